// A block of the sweep: its arguments, its shared memory, its share of the banks, and the copies that it starts.
#pragma once

#include <cmath>
#include <cstdint>

#include "infonce_operands.cuh"

namespace fastcssl::infonce::gpu {

struct BankView {
  const unsigned char* rows_KD;
  std::int64_t num_rows;
  const std::int64_t* filled;
};

struct Sweep {
  const float* scaled_MD;
  const std::int64_t* own_M;
  std::int64_t num_rows;  // M
  int dim;                // D
  int num_banks;
  float* sums_SMD;     // for the S splits of all launches
  float2* weights_MS;  // reference and sum of weights; if the sum is 0, no key was seen and there are no sums
  int num_splits;      // in this launch
  int first_split;     // the position of the launch's first split among all splits
  int all_splits;      // S
  BankView banks[kMaxBanks];
};

// The tiles of one bank that a block processes.
struct Segment {
  const unsigned char* keys_KD;
  std::int64_t first_key;
  int num_tiles, last_keys;  // all tiles are full except the last one
};
static_assert(sizeof(Segment) == kSegmentBytes, "the table of tiles must agree");

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNone = -1e30f;  // the reference before the first key; finite, so that its differences are not NaN
// Weights are below 2^15, and the largest one is at least 2^11 when the reference moves. float16 then represents
// weights down to 2^-36 of the largest.
constexpr float kHead = 11.0f, kLimit = 15.0f;
// Queries are scaled by a power of two so that their largest number is in 2^10 .. 2^11, which float16 represents well,
// also as a sum of two numbers.
constexpr int kQueryExponent = 10;

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

__device__ inline std::int64_t visible_rows(const BankView& bank) {
  if (bank.filled == nullptr) return bank.num_rows;
  const std::int64_t filled = *bank.filled;
  return filled < 0 ? 0 : filled < bank.num_rows ? filled : bank.num_rows;
}

template <typename T, bool kExact, int kDim, bool kFew>
struct SweepBlock {
  using Math = Operands<T, kExact>;
  using Rows = typename Math::Rows;
  using Keys = typename Math::Keys;
  static constexpr Tile kTile = tile_of(sizeof(T), kExact, kDim, kFew);
  static constexpr int kThreads = kTile.threads(), kBlockRows = kTile.rows(), kRowTiles = kTile.row_tiles;
  static constexpr int kKeys = kTile.keys, kKeyTiles = kKeys / kKeyTile, kStages = kTile.stages;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(T)), kRowChunks = kRowBytes / kChunkBytes;
  static constexpr int kStageBytes = static_cast<int>(stage_bytes(kTile, sizeof(T)));
  static constexpr int kSteps = kDim / Math::kDepth;
  static constexpr int kStepBytes = Math::kQueryFragments * kFragmentBytes;
  static constexpr int kQueryBytes = kBlockRows / kRowTile * kSteps * kStepBytes;
  static constexpr int kGroups = kDim / kKeyTile / Math::kGroup;
  static constexpr bool kExactSums = kExact;
  static constexpr bool kSumsApart = sums_apart(kExact, kDim);
  static constexpr int kUnrolledSteps = kExact ? 2 : kSteps;  // split operands leave no registers for more
  static constexpr int kSharedBytes = static_cast<int>(sweep_shared_bytes(kTile, sizeof(T), kExact));
  static constexpr int kLoadRows = kThreads / kRowChunks;  // keys that the block copies at a time
  static constexpr int kLoads = kKeys / kLoadRows;
  static_assert((kLoadRows & (kLoadRows - 1)) == 0, "keys a power of two apart differ by one exclusive or");
  static_assert(kRowChunks >= 8 && kThreads % kRowChunks == 0 && kKeys % kLoadRows == 0, "whole rows per pass");
  static_assert(kKeys % (2 * kKeyTile) == 0 && kKeys % Math::kDepth == 0 && kStages >= 2, "whole products");
  static_assert(kQueryBytes == kBlockRows * kDim * query_bytes(sizeof(T), kExact), "the table of tiles must agree");
  static_assert(kSharedBytes <= static_cast<int>(kLeastSharedBytes), "must fit on every architecture");
  static_assert(kBlockRows * static_cast<int>(sizeof(float)) <= kStageBytes, "factors must fit into the first stage");
  static_assert(kRowBytes <= 1024, "rows must not be longer than the alignment of shared memory");

  const Sweep& sweep;
  unsigned char* const stages;
  unsigned char* const queries;
  Segment* const segments;  // one per bank
  float* const factors;     // scale each row's logits to base 2; in the first stage, until the first copy
  const unsigned stages_address;

  __device__ SweepBlock(const Sweep& arguments, unsigned char* shared)
      : sweep(arguments),
        stages(shared),
        queries(shared + kStages * kStageBytes),
        segments(reinterpret_cast<Segment*>(queries + kQueryBytes)),
        factors(reinterpret_cast<float*>(shared)),
        stages_address(shared_address(shared)) {}

  __device__ static std::int64_t first_row() { return static_cast<std::int64_t>(blockIdx.x) * kBlockRows; }

  // Each warp loads one row at a time. Rows past the last one are zeros.
  __device__ void load_queries() const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll(1024 / kDim)  // enough for the loads to hide each other's latency
    for (int i_row = 0; i_row < kBlockRows / kTile.warps; ++i_row) {
      const int row = warp + i_row * kTile.warps;
      const bool inside = first_row() + row < sweep.num_rows;
      const float* scaled_D = sweep.scaled_MD + (first_row() + row) * sweep.dim;
      float values[kDim / kWarp], largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kDim / kWarp; ++i) {
        const int column = lane + i * kWarp;
        values[i] = inside && column < sweep.dim ? scaled_D[column] : 0.0f;
        largest = fmaxf(largest, fabsf(values[i]));
      }
      const int exponent = static_cast<int>(__float_as_uint(warp_max(largest)) >> 23) - 127;
      const int shift = max(-100, min(100, kQueryExponent - exponent));
      const float scale = __uint_as_float(static_cast<unsigned>(shift + 127) << 23);
#pragma unroll
      for (int i = 0; i < kDim / kWarp; ++i) {
        const int column = lane + i * kWarp;
        unsigned char* fragments = queries + (row / kRowTile * kSteps + column / Math::kDepth) * kStepBytes;
        Math::store_query(fragments, row % kRowTile, column % Math::kDepth, values[i] * scale);
      }
      if (lane == 0) factors[row] = kLog2E * __uint_as_float(static_cast<unsigned>(127 - shift) << 23);
    }
  }

  // Split i of n gets the share from i / n to (i + 1) / n of the tiles of all banks. One thread handles one bank.
  __device__ void cut_segments() const {
    const int mine = static_cast<int>(threadIdx.x);
    if (mine >= sweep.num_banks) return;
    std::int64_t num_tiles = 0, tiles_before = 0, my_tiles = 0, my_keys = 0;
    for (int b = 0; b < sweep.num_banks; ++b) {
      const std::int64_t keys = visible_rows(sweep.banks[b]), tiles = (keys + kKeys - 1) / kKeys;
      if (b == mine) {
        tiles_before = num_tiles;
        my_tiles = tiles;
        my_keys = keys;
      }
      num_tiles += tiles;
    }
    const std::int64_t begin = num_tiles * blockIdx.y / sweep.num_splits - tiles_before;
    const std::int64_t end = num_tiles * (blockIdx.y + 1) / sweep.num_splits - tiles_before;
    const std::int64_t first = begin > 0 ? begin : 0, last = end < my_tiles ? end : my_tiles;
    const std::int64_t key = first * kKeys, rest = my_keys - (last - 1) * kKeys;
    segments[mine] = {sweep.banks[mine].rows_KD + key * sweep.dim * static_cast<int>(sizeof(T)), key,
                      first < last ? static_cast<int>(last - first) : 0, rest < kKeys ? static_cast<int>(rest) : kKeys};
  }

  // Returns the offset of this thread's first copy in a tile. The next ones are kLoadRows keys apart.
  __device__ int load_offset() const {
    const int thread = fresh_thread(), key = thread / kRowChunks, chunk = thread % kRowChunks;
    return key * sweep.dim * static_cast<int>(sizeof(T)) + chunk * kChunkBytes;
  }

  // Starts the copies of one tile with `count` keys. The rest, and columns from D on, become zeros.
  __device__ void load_keys(int stage, const unsigned char* source, int count) const {
    const int thread = fresh_thread(), key = thread / kRowChunks, chunk = thread % kRowChunks;
    const int row_bytes = sweep.dim * static_cast<int>(sizeof(T));
    const bool column_inside = chunk * kChunkBytes < row_bytes;
    const unsigned target = stages_address + static_cast<unsigned>(stage * kStageBytes) + place<kRowBytes>(key, chunk);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool inside = column_inside && key + i * kLoadRows < count;
      // The address of key + i kLoadRows, computed from that of the thread's first key.
      const unsigned moved = (target ^ static_cast<unsigned>(i * kLoadRows % 8 * kChunkBytes)) +
                             static_cast<unsigned>(i * kLoadRows * kRowBytes);
      copy_async(moved, inside ? source + i * kLoadRows * row_bytes : sweep.banks[0].rows_KD, inside);
    }
  }
};

}  // namespace fastcssl::infonce::gpu
