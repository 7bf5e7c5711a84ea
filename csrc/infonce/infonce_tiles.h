// Shapes of the sweep's blocks: one table for the kernels, for the launch, and for whoever predicts their speed
// (benchmarks read it as text). No CUDA in here.
#pragma once

#include <cstddef>

namespace fastcssl::infonce {

constexpr int kRowTile = 16;  // rows of one tensor-core product
constexpr int kKeyTile = 8;   // keys of one
constexpr int kFewRows = 64;  // up to here half-precision sweeps of one product take the smaller block
constexpr int kMaxBanks = 8;  // in one launch; more banks are more launches
constexpr int kMaxDim = 256;
constexpr int kChunkBytes = 16;  // of one asynchronous copy
constexpr int kCombineWarps = 8;
constexpr int kEnqueueWarps = 8;

struct Tile {
  int dim;  // columns of the block; rows of fewer are padded with zeros in shared memory
  int warps;
  int row_tiles;  // of 16 rows each, in one warp
  int keys;       // of a bank, in one stage
  int stages;     // of the pipeline of asynchronous copies
  int blocks;     // on one multiprocessor, that registers must allow; shared memory does from 164 kB on, or sooner
  int registers;  // of a thread: the most that any architecture may use

  constexpr int threads() const { return warps * 32; }
  constexpr int rows() const { return warps * row_tiles * kRowTile; }
};

// Half-precision banks, one product of rounded operands.
constexpr Tile kHalf64{64, 4, 2, 32, 3, 3, 168};
constexpr Tile kHalf128{128, 4, 2, 32, 2, 2, 248};
constexpr Tile kHalf256{256, 8, 1, 32, 2, 1, 248};
// The same for few rows: the bank's bytes are the bound, so more of them are on their way.
constexpr Tile kHalfFew64{64, 4, 1, 64, 3, 3, 160};
constexpr Tile kHalfFew128{128, 4, 1, 32, 4, 3, 168};
// Half-precision banks, queries and weights as the sum of two (float16) or three (bfloat16) numbers.
constexpr Tile kHalfExact64{64, 4, 1, 32, 3, 3, 160};
constexpr Tile kHalfExact128{128, 8, 1, 32, 3, 1, 240};
constexpr Tile kHalfExact256{256, 4, 1, 16, 3, 1, 240};
// float32 banks, as one or as two TF32 numbers.
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

// Tensor cores truncate their sums. Where numbers are split, that would show: the sums of a tile are kept apart and
// then added, which rounds. At 256 columns there are no registers for that.
constexpr bool sums_apart(bool exact, int dim) { return exact && dim < 256; }
// Longer chains of truncated sums are cut by another split.
constexpr int max_split_keys(bool exact, int dim) { return exact && dim == 256 ? 8192 : 16384; }

constexpr int padded_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Queries stay in shared memory, in the bank's type or, where they are split, as float32.
constexpr int query_bytes(int element_bytes, bool exact) { return exact ? 4 : element_bytes; }

// The stages first, then the queries, then the block's part of each bank.
constexpr int kSegmentBytes = 24;
constexpr std::size_t stage_bytes(const Tile& tile, int element_bytes) {
  return static_cast<std::size_t>(tile.keys) * tile.dim * element_bytes;
}
constexpr std::size_t sweep_shared_bytes(const Tile& tile, int element_bytes, bool exact) {
  return tile.stages * stage_bytes(tile, element_bytes) +
         static_cast<std::size_t>(tile.rows()) * tile.dim * query_bytes(element_bytes, exact) +
         kMaxBanks * kSegmentBytes;
}

// What a block may have where it may have least: compute capability 8.6, 8.9 and 12.0.
constexpr std::size_t kLeastSharedBytes = 99 << 10;

}  // namespace fastcssl::infonce
