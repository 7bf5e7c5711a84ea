// One sweep over the banks: of each row, the sum of exp(logit) over the keys it sees and the so weighted sum of keys.
//
// A block has some rows and, of all key tiles of the banks together, one share (a split): tiles come through a ring of
// asynchronous copies and feed both products. Sums are relative to 2^reference; the reference follows the running
// maximum only when it must, so that the sums are rarely scaled. What a split found is written for `combine`.
#pragma once

#include <cmath>
#include <cstdint>

#include "../launch.cuh"
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
  float* sums_SMD;      // S splits of all launches
  float2* weights_MS;   // reference, and the sum of weights; 0: no key seen, then there are no sums
  int num_splits;       // of this launch
  int first_split;      // its place among all of them
  int all_splits;       // S
  BankView banks[kMaxBanks];
};

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNone = -1e30f;  // the reference before the first key; finite, so that its differences are numbers
// Weights lie below 2^15, and the largest one is at least 2^11 when the reference moves: float16 then has them to 2^-36
// of the largest.
constexpr float kHead = 11.0f, kLimit = 15.0f;
// Queries are scaled by a power of two to a largest number in 2^10 .. 2^11, which float16 holds and splits well.
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
  static constexpr bool kSumsApart = kExact;
  static constexpr int kSharedBytes = static_cast<int>(sweep_shared_bytes(kTile, sizeof(T), kExact));
  static constexpr int kLoads = kKeys * kRowChunks / kThreads;  // of one thread, for one stage
  static_assert(kRowChunks >= 8 && kThreads % kRowChunks == 0 && kKeys * kRowChunks % kThreads == 0, "whole rows a pass");
  static_assert(kKeys % (2 * kKeyTile) == 0 && kKeys % Math::kDepth == 0 && kStages >= 2, "whole products");
  static_assert(kQueryBytes == kBlockRows * kDim * query_bytes(sizeof(T), kExact), "the table of tiles");
  static_assert(kSharedBytes <= static_cast<int>(kLeastSharedBytes), "every architecture");
  static_assert(kMaxBanks <= kWarp, "a bank a lane");

  const Sweep& sweep;
  unsigned char* const stages;
  unsigned char* const queries;
  std::int64_t* const own;  // of each row of the block; -1: sees all
  float* const factors;     // of each row's logits, to the base 2
  const unsigned stages_address;
  const int warp, lane;
  const std::int64_t first_row;

  __device__ SweepBlock(const Sweep& arguments, unsigned char* shared)
      : sweep(arguments),
        stages(shared),
        queries(shared + kStages * kStageBytes),
        own(reinterpret_cast<std::int64_t*>(queries + kQueryBytes)),
        factors(reinterpret_cast<float*>(own + kBlockRows)),
        stages_address(shared_address(shared)),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        lane(static_cast<int>(threadIdx.x) % kWarp),
        first_row(static_cast<std::int64_t>(blockIdx.x) * kBlockRows) {}

  // A warp a row. Rows after the last are zeros.
  __device__ void load_queries() const {
    for (int row = warp; row < kBlockRows; row += kTile.warps) {
      const bool inside = first_row + row < sweep.num_rows;
      const float* scaled_D = sweep.scaled_MD + (first_row + row) * sweep.dim;
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
      if (lane == 0) {
        factors[row] = kLog2E * __uint_as_float(static_cast<unsigned>(127 - shift) << 23);
        own[row] = inside && sweep.own_M != nullptr ? sweep.own_M[first_row + row] : -1;
      }
    }
  }

  // Starts the copies of one tile: `count` keys at rows_KD, zeros after them and after column D.
  __device__ void load_keys(int stage, const unsigned char* rows_KD, std::int64_t count) const {
    const int chunk = static_cast<int>(threadIdx.x) % kRowChunks, key = static_cast<int>(threadIdx.x) / kRowChunks;
    const int row_bytes = sweep.dim * static_cast<int>(sizeof(T));
    const bool column_inside = chunk * kChunkBytes < row_bytes;
    const unsigned target = stages_address + static_cast<unsigned>(stage * kStageBytes);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = key + i * (kThreads / kRowChunks);
      const bool inside = column_inside && at < count;
      const std::int64_t offset = inside ? static_cast<std::int64_t>(at) * row_bytes + chunk * kChunkBytes : 0;
      copy_async(target + place<kRowBytes>(at, chunk), rows_KD + offset, inside);
    }
  }
};

// What one warp knows of its rows.
template <typename Block>
struct RowState {
  using Math = typename Block::Math;
  float means[Block::kRowTiles][Block::kGroups * Math::kGroup][4] = {};  // sums, until `combine` divides them
  float reference[Block::kRowTiles][2], sum[Block::kRowTiles][2] = {}, factor[Block::kRowTiles][2];

  __device__ explicit RowState(const Block& block) {
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[r][half] = kNone;
        factor[r][half] = block.factors[row_of(block, r, half)];
      }
    }
  }

  // Of the block; half 0 is row g of tile r, half 1 row g + 8.
  __device__ static int row_of(const Block& block, int r, int half) {
    return (block.warp * Block::kRowTiles + r) * kRowTile + half * 8 + block.lane / 4;
  }

  // One tile that has arrived in `stage`; its first key is row `first_key` of its bank, `count` keys are there.
  __device__ void add_tile(const Block& block, int stage, std::int64_t first_key, std::int64_t count) {
    constexpr int kRowTiles = Block::kRowTiles, kKeyTiles = Block::kKeyTiles;
    const unsigned char* tile = block.stages + stage * Block::kStageBytes;
    const unsigned address = block.stages_address + static_cast<unsigned>(stage * Block::kStageBytes);
    float logits[kRowTiles][kKeyTiles][4] = {};
    multiply_queries(block, address, logits);
    hide(block, first_key, count, logits);
    follow_maximum(logits);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float tile_sum[2] = {};
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          logits[r][k][i] = power_of_two(logits[r][k][i] * factor[r][i / 2] - reference[r][i / 2]);
          tile_sum[i / 2] += logits[r][k][i];
        }
      }
      sum[r][0] += tile_sum[0];
      sum[r][1] += tile_sum[1];
    }
    add_values(block, tile, address, logits);
  }

  __device__ void multiply_queries(const Block& block, unsigned address,
                                   float (&logits)[Block::kRowTiles][Block::kKeyTiles][4]) const {
    const int lane = block.lane;
    const unsigned lane_place = place<Block::kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const unsigned char* fragments = block.queries + block.warp * Block::kRowTiles * Block::kSteps * Block::kStepBytes;
#pragma unroll
    for (int step = 0; step < Block::kSteps; ++step) {
      typename Math::Rows rows[Block::kRowTiles];
#pragma unroll
      for (int r = 0; r < Block::kRowTiles; ++r) {
        rows[r] = Math::load_query(fragments + (r * Block::kSteps + step) * Block::kStepBytes, lane);
      }
      const unsigned step_address = address + (lane_place ^ static_cast<unsigned>(step * 2 * kChunkBytes));
#pragma unroll
      for (int k = 0; k < Block::kKeyTiles; k += 2) {
        unsigned bits[4];
        load_matrices(bits, step_address + static_cast<unsigned>(k * kKeyTile * Block::kRowBytes));
        const typename Math::Keys low = Math::keys(bits[0], bits[1]), high = Math::keys(bits[2], bits[3]);
#pragma unroll
        for (int r = 0; r < Block::kRowTiles; ++r) {
          Math::multiply(logits[r][k], rows[r], low);
          Math::multiply(logits[r][k + 1], rows[r], high);
        }
      }
    }
  }

  // Keys past the bank's end and the row's own key get weight 0.
  __device__ void hide(const Block& block, std::int64_t first_key, std::int64_t count,
                       float (&logits)[Block::kRowTiles][Block::kKeyTiles][4]) const {
    int hidden[Block::kRowTiles][2];
    bool touched = count < Block::kKeys;
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t own = block.own[row_of(block, r, half)] - first_key;
        hidden[r][half] = own >= 0 && own < Block::kKeys ? static_cast<int>(own) : -1;
        touched |= hidden[r][half] >= 0;
      }
    }
    if (!touched) return;
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int k = 0; k < Block::kKeyTiles; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = k * kKeyTile + block.lane % 4 * 2 + i % 2;
          if (key >= count || key == hidden[r][i / 2]) logits[r][k][i] = -INFINITY;
        }
      }
    }
  }

  __device__ void follow_maximum(const float (&logits)[Block::kRowTiles][Block::kKeyTiles][4]) {
    float highest[Block::kRowTiles][2];
    bool moves = false;
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int k = 0; k < Block::kKeyTiles; ++k) {
          top = fmaxf(top, fmaxf(logits[r][k][half * 2], logits[r][k][half * 2 + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2)) * factor[r][half];
        highest[r][half] = top;
        moves |= top > reference[r][half] + kLimit;
      }
    }
    if (!__any_sync(kAllLanes, moves)) return;
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!(highest[r][half] > reference[r][half] + kLimit)) continue;
        const float next = highest[r][half] - kHead, scale = power_of_two(reference[r][half] - next);
        reference[r][half] = next;
        sum[r][half] *= scale;
#pragma unroll
        for (int n = 0; n < Block::kGroups * Math::kGroup; ++n) {
          means[r][n][half * 2] *= scale;
          means[r][n][half * 2 + 1] *= scale;
        }
      }
    }
  }

  // Tensor cores truncate their sums. Where that shows, a tile is summed apart and then added, which rounds.
  __device__ void add_values(const Block& block, const unsigned char* tile, unsigned address,
                             const float (&weights)[Block::kRowTiles][Block::kKeyTiles][4]) {
    constexpr int kGroup = Math::kGroup, kKeySteps = Block::kKeys / Math::kDepth, kTilesOfStep = Math::kDepth / kKeyTile;
    typename Math::Rows rows[Block::kRowTiles][kKeySteps];
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) rows[r][step] = Math::weights(&weights[r][step * kTilesOfStep]);
    }
#pragma unroll
    for (int group = 0; group < Block::kGroups; ++group) {
      float apart[Block::kRowTiles][kGroup][4] = {};
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        typename Math::Keys keys[kGroup];
        Math::template values<Block::kRowBytes>(keys, tile, address, step * Math::kDepth, group, block.lane);
#pragma unroll
        for (int n = 0; n < kGroup; ++n) {
#pragma unroll
          for (int r = 0; r < Block::kRowTiles; ++r) {
            Math::multiply(Block::kSumsApart ? apart[r][n] : means[r][group * kGroup + n], rows[r][step], keys[n]);
          }
        }
      }
      if constexpr (Block::kSumsApart) {
#pragma unroll
        for (int n = 0; n < kGroup * Block::kRowTiles * 4; ++n) {
          means[n / 4 % Block::kRowTiles][group * kGroup + n / 4 / Block::kRowTiles][n % 4] +=
              apart[n / 4 % Block::kRowTiles][n / 4 / Block::kRowTiles][n % 4];
        }
      }
    }
  }

  __device__ void write(const Block& block) {
    const Sweep& sweep = block.sweep;
    const std::int64_t split = sweep.first_split + static_cast<int>(blockIdx.y);
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[r][half] + __shfl_xor_sync(kAllLanes, sum[r][half], 1);
        total += __shfl_xor_sync(kAllLanes, total, 2);
        const std::int64_t row = block.first_row + row_of(block, r, half);
        if (row >= sweep.num_rows) continue;
        if (block.lane % 4 == 0) sweep.weights_MS[row * sweep.all_splits + split] = {reference[r][half], total};
        if (total == 0.0f) continue;
        float* sums_D = sweep.sums_SMD + (split * sweep.num_rows + row) * sweep.dim;
#pragma unroll
        for (int n = 0; n < Block::kGroups * Math::kRuns; ++n) {
          const int group = n / Math::kRuns, run = n % Math::kRuns, column = Math::column(group, run, block.lane % 4);
          if (column >= sweep.dim) continue;
          const float(*sums)[4] = &means[r][group * Math::kGroup];
          if constexpr (Math::kRun == 4) {
            *reinterpret_cast<float4*>(sums_D + column) = {Math::result(sums, run, 0, half), Math::result(sums, run, 1, half),
                                                           Math::result(sums, run, 2, half), Math::result(sums, run, 3, half)};
          } else {
            *reinterpret_cast<float2*>(sums_D + column) = {Math::result(sums, run, 0, half), Math::result(sums, run, 1, half)};
          }
        }
      }
    }
  }
};

template <typename T, bool kExact, int kDim, bool kFew>
__global__ void __launch_bounds__(tile_of(sizeof(T), kExact, kDim, kFew).threads(),
                                  tile_of(sizeof(T), kExact, kDim, kFew).blocks)
    sweep_banks(const __grid_constant__ Sweep sweep) {
  using Block = SweepBlock<T, kExact, kDim, kFew>;
  FASTCSSL_DYNAMIC_SHARED(shared);
  const Block block(sweep, shared);
  block.load_queries();
  __syncthreads();  // queries are whole
  RowState<Block> state(block);
  // A warp whose rows are all past the end helps with the copies only.
  const bool works = block.first_row + block.warp * Block::kRowTiles * kRowTile < sweep.num_rows;

  // Of the tiles of all banks, this split has those from `begin` to `end`.
  std::int64_t num_tiles = 0;
  for (int b = 0; b < sweep.num_banks; ++b) num_tiles += (visible_rows(sweep.banks[b]) + Block::kKeys - 1) / Block::kKeys;
  const std::int64_t begin = num_tiles * blockIdx.y / sweep.num_splits;
  const std::int64_t end = num_tiles * (blockIdx.y + 1) / sweep.num_splits;
  std::int64_t bank_begin = 0;
  for (int b = 0; b < sweep.num_banks; ++b) {
    const BankView& bank = sweep.banks[b];
    const std::int64_t num_keys = visible_rows(bank), bank_end = bank_begin + (num_keys + Block::kKeys - 1) / Block::kKeys;
    const std::int64_t first = (begin > bank_begin ? begin : bank_begin) - bank_begin;
    const std::int64_t last = (end < bank_end ? end : bank_end) - bank_begin;
    bank_begin = bank_end;
    if (first >= last) continue;
    const unsigned char* rows_KD = bank.rows_KD;
    int load_stage = 0, stage = 0;
    const auto load = [&](std::int64_t tile) {
      if (tile < last) {
        const std::int64_t key = tile * Block::kKeys;
        block.load_keys(load_stage, rows_KD + key * sweep.dim * static_cast<int>(sizeof(T)), num_keys - key);
      }
      commit_copies();  // of nothing after the last tile, so that a group is always a tile
      load_stage = load_stage + 1 < Block::kStages ? load_stage + 1 : 0;
    };
    __syncthreads();  // the tiles of the bank before are done with
#pragma unroll
    for (int i = 0; i < Block::kStages - 1; ++i) load(first + i);
    for (std::int64_t tile = first; tile < last; ++tile) {
      wait_for_copies<Block::kStages - 2>();
      __syncthreads();  // everybody's copies of this tile have arrived, and the tile before it is done with
      load(tile + Block::kStages - 1);
      const std::int64_t key = tile * Block::kKeys;
      if (works) state.add_tile(block, stage, key, num_keys - key);
      stage = stage + 1 < Block::kStages ? stage + 1 : 0;
    }
  }
  if (works) state.write(block);
}

}  // namespace fastcssl::infonce::gpu
