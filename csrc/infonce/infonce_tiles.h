// The shapes of the sweep's blocks: one table for the kernels, for the launch, and for the benchmarks' model of their
// speed, which includes this header. It contains no CUDA code.
#pragma once

#include <cstddef>

namespace fastcssl::infonce {

constexpr int kRowTile = 16;  // rows of one tensor-core product
constexpr int kKeyTile = 8;   // keys of one tensor-core product
constexpr int kFewRows = 64;  // up to this many rows, half-precision sweeps with one product use the smaller block
constexpr int kMaxBanks = 8;  // per launch; more banks need more launches
constexpr int kMaxDim = 256;
constexpr int kChunkBytes = 16;  // bytes of one asynchronous copy
constexpr int kCombineWarps = 8;
constexpr int kEnqueueWarps = 8;

struct Tile {
  int dim;  // columns of the block; narrower rows are padded with zeros in shared memory
  int warps;
  int row_tiles;  // per warp, of 16 rows each
  int keys;       // of a bank, per stage
  int stages;     // of the pipeline of asynchronous copies
  int blocks;     // per multiprocessor that registers must allow; 164 kB of shared memory allow them too
  int registers;  // per thread: the most that any architecture may use

  constexpr int threads() const { return warps * 32; }
  constexpr int rows() const { return warps * row_tiles * kRowTile; }
};

// Half-precision banks, with one product of rounded operands.
constexpr Tile kHalf64{64, 4, 2, 32, 3, 3, 168};
constexpr Tile kHalf128{128, 4, 2, 32, 2, 2, 248};
constexpr Tile kHalf256{256, 8, 1, 32, 2, 1, 248};
// The same for few rows. Reading the bank is the bottleneck, so more of its bytes are in flight.
constexpr Tile kHalfFew64{64, 4, 1, 64, 3, 3, 160};
constexpr Tile kHalfFew128{128, 4, 1, 32, 4, 3, 168};
// Half-precision banks, with queries and weights as the sum of two (float16) or three (bfloat16) numbers.
constexpr Tile kHalfExact64{64, 4, 1, 32, 3, 3, 160};
constexpr Tile kHalfExact128{128, 8, 1, 32, 3, 1, 240};
constexpr Tile kHalfExact256{256, 4, 1, 16, 3, 1, 240};
// float32 banks, with each number as one or two TF32 numbers.
constexpr Tile kFloat64{64, 8, 1, 32, 2, 2, 128};
constexpr Tile kFloatExact64{64, 4, 1, 32, 2, 3, 168};
constexpr Tile kFloat128{128, 8, 1, 32, 2, 1, 240};
constexpr Tile kFloat256{256, 4, 1, 16, 2, 1, 240};

// `dim` is 64, 128 or 256.
constexpr Tile tile_of(int element_bytes, bool exact, int dim, bool few) {
  if (element_bytes == 4) return dim == 64 ? (exact ? kFloatExact64 : kFloat64) : dim == 128 ? kFloat128 : kFloat256;
  if (exact) return dim == 64 ? kHalfExact64 : dim == 128 ? kHalfExact128 : kHalfExact256;
  if (few && dim == 64) return kHalfFew64;
  if (few && dim == 128) return kHalfFew128;
  return dim == 64 ? kHalf64 : dim == 128 ? kHalf128 : kHalf256;
}

// Tensor cores truncate their sums, which would reduce the accuracy of split numbers. Therefore the sums of a tile are
// kept separate and then added by an instruction that rounds. At 256 columns there are no registers for that.
constexpr bool sums_apart(bool exact, int dim) { return exact && dim < 256; }
// Limits the length of chains of truncated sums: more keys need another split.
constexpr int max_split_keys(bool exact, int dim) { return exact && dim == 256 ? 8192 : 16384; }

constexpr int padded_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Queries stay in shared memory, in the bank's type or, if they are split, as float32.
constexpr int query_bytes(int element_bytes, bool exact) { return exact ? 4 : element_bytes; }

// Shared memory holds the stages first, then the queries, then the block's segment of each bank.
constexpr int kSegmentBytes = 24;
constexpr std::size_t stage_bytes(const Tile& tile, int element_bytes) {
  return static_cast<std::size_t>(tile.keys) * tile.dim * element_bytes;
}
constexpr std::size_t sweep_shared_bytes(const Tile& tile, int element_bytes, bool exact) {
  return tile.stages * stage_bytes(tile, element_bytes) +
         static_cast<std::size_t>(tile.rows()) * tile.dim * query_bytes(element_bytes, exact) +
         kMaxBanks * kSegmentBytes;
}

// The shared memory of a block on the architectures with the least: compute capability 8.6, 8.9 and 12.0.
constexpr std::size_t kLeastSharedBytes = 99 << 10;

}  // namespace fastcssl::infonce
