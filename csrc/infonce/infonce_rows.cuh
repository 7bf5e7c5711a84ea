// The state of a warp's rows during the sweep, and how a tile of keys updates it.
#pragma once

#include <cmath>
#include <cstdint>

#include "infonce_block.cuh"

namespace fastcssl::infonce::gpu {

// The state of one warp's rows.
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
        factor[r][half] = block.factors[row_of(fresh_thread(), r, half)];
      }
    }
  }

  // Returns the row in the block: row g of tile r for half 0, row g + 8 for half 1.
  __device__ static int row_of(int thread, int r, int half) {
    return (thread / kWarp * Block::kRowTiles + r) * kRowTile + half * 8 + thread % kWarp / 4;
  }

  // Adds a tile of `count` keys that has arrived in `stage`. Its first key is row `first_key` of its bank.
  __device__ void add_tile(const Block& block, int stage, std::int64_t first_key, int count) {
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
    add_values(tile, address, logits);
  }

  __device__ void multiply_queries(const Block& block, unsigned address,
                                   float (&logits)[Block::kRowTiles][Block::kKeyTiles][4]) const {
    const int thread = fresh_thread(), lane = thread % kWarp;
    const unsigned lane_place = place<Block::kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const int first_tile = thread / kWarp * Block::kRowTiles;
    const unsigned char* fragments = block.queries + first_tile * Block::kSteps * Block::kStepBytes;
#pragma unroll(Block::kUnrolledSteps)
    for (int step = 0; step < Block::kSteps; ++step) {
      typename Math::Rows rows[Block::kRowTiles];
#pragma unroll
      for (int r = 0; r < Block::kRowTiles; ++r) {
        rows[r] = Math::load_query(fragments + (r * Block::kSteps + step) * Block::kStepBytes, lane);
      }
      const unsigned step_address = (address + lane_place) ^ chunk_pair(step);
#pragma unroll
      for (int k = 0; k < Block::kKeyTiles; k += 2) {
        unsigned bits[4];
        load_matrices(bits, step_address + static_cast<unsigned>(k * kKeyTile * Block::kRowBytes));
        const typename Math::Keys low = Math::keys(bits[0], bits[1]), high = Math::keys(bits[2], bits[3]);
#pragma unroll
        for (int r = 0; r < Block::kRowTiles; ++r) {
          add_product(logits[r][k], rows[r], low);
          add_product(logits[r][k + 1], rows[r], high);
        }
      }
    }
  }

  // Tensor cores truncate sums, which would reduce the accuracy of split numbers. Therefore their product is added by
  // an instruction that rounds.
  __device__ static void add_product(float (&logits)[4], const typename Math::Rows& rows,
                                     const typename Math::Keys& keys) {
    if constexpr (Block::kExactSums) {
      float product[4] = {};
      Math::multiply(product, rows, keys);
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[i] += product[i];
    } else {
      Math::multiply(logits, rows, keys);
    }
  }

  // Gives weight 0 to keys past the end of the bank and to each row's own key.
  __device__ void hide(const Block& block, std::int64_t first_key, int count,
                       float (&logits)[Block::kRowTiles][Block::kKeyTiles][4]) const {
    const int thread = fresh_thread();
    int hidden[Block::kRowTiles][2];
    bool touched = count < Block::kKeys;
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        hidden[r][half] = -1;
        const std::int64_t row = Block::first_row() + row_of(thread, r, half);
        if (block.sweep.own_M == nullptr || row >= block.sweep.num_rows) continue;
        const std::int64_t own = block.sweep.own_M[row] - first_key;
        if (own >= 0 && own < Block::kKeys) hidden[r][half] = static_cast<int>(own);
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
          const int key = k * kKeyTile + thread % 4 * 2 + i % 2;
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

  __device__ void add_values(const unsigned char* tile, unsigned address,
                             const float (&weights)[Block::kRowTiles][Block::kKeyTiles][4]) {
    constexpr int kGroup = Math::kGroup;
    constexpr int kKeySteps = Block::kKeys / Math::kDepth, kTilesOfStep = Math::kDepth / kKeyTile;
    const int lane = fresh_thread() % kWarp;
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
        Math::template values<Block::kRowBytes>(keys, tile, address, step * Math::kDepth, group, lane);
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
    const int thread = fresh_thread();
    const std::int64_t split = sweep.first_split + static_cast<int>(blockIdx.y);
#pragma unroll
    for (int r = 0; r < Block::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[r][half] + __shfl_xor_sync(kAllLanes, sum[r][half], 1);
        total += __shfl_xor_sync(kAllLanes, total, 2);
        const std::int64_t row = block.first_row() + row_of(thread, r, half);
        if (row >= sweep.num_rows) continue;
        if (thread % 4 == 0) sweep.weights_MS[row * sweep.all_splits + split] = {reference[r][half], total};
        if (total == 0.0f) continue;
        float* sums_D = sweep.sums_SMD + (split * sweep.num_rows + row) * sweep.dim;
#pragma unroll
        for (int n = 0; n < Block::kGroups * Math::kRuns; ++n) {
          const int group = n / Math::kRuns, run = n % Math::kRuns, column = Math::column(group, run, thread % 4);
          if (column >= sweep.dim) continue;
          Math::store(sums_D + column, &means[r][group * Math::kGroup], run, half);
        }
      }
    }
  }
};

}  // namespace fastcssl::infonce::gpu
