// One sweep over the banks. For each row, it computes the sum of exp(logit) over the keys that the row sees, and the
// sum of the keys with these weights.
//
// A block has some rows and one share (a split) of the key tiles of all banks. Tiles arrive through a ring of
// asynchronous copies and are used by both products. Sums are relative to 2^reference. The reference follows the
// running maximum only when necessary, so that the sums are rarely scaled. Each split writes its results for `combine`.
#pragma once

#include "../launch.cuh"
#include "infonce_block.cuh"
#include "infonce_rows.cuh"

namespace fastcssl::infonce::gpu {

template <typename T, bool kExact, int kDim, bool kFew>
__global__ void __launch_bounds__(tile_of(sizeof(T), kExact, kDim, kFew).threads(),
                                  tile_of(sizeof(T), kExact, kDim, kFew).blocks)
    sweep_banks(const __grid_constant__ Sweep sweep) {
  using Block = SweepBlock<T, kExact, kDim, kFew>;
  FASTCSSL_DYNAMIC_SHARED(shared);
  const Block block(sweep, shared);
  block.cut_segments();
  block.load_queries();
  __syncthreads();  // segments and queries are complete
  RowState<Block> state(block);
  // If all rows of a warp are past the end, the warp only helps with the copies.
  const bool works = block.first_row() + RowState<Block>::row_of(fresh_thread() / kWarp * kWarp, 0, 0) < sweep.num_rows;
  const int tile_bytes = Block::kKeys * sweep.dim * static_cast<int>(sizeof(T));
  for (int b = 0; b < sweep.num_banks; ++b) {
    Segment segment = block.segments[b];
    segment.keys_KD += block.load_offset();
    int load_stage = 0, stage = 0;
    const auto keys_of = [&](int tile) { return tile + 1 < segment.num_tiles ? Block::kKeys : segment.last_keys; };
    const auto load = [&](int tile) {
      if (tile < segment.num_tiles) block.load_keys(load_stage, segment.keys_KD, keys_of(tile));
      commit_copies();  // empty after the last tile, so that each group is one tile
      segment.keys_KD += tile_bytes;
      load_stage = load_stage + 1 < Block::kStages ? load_stage + 1 : 0;
    };
    __syncthreads();  // the factors, or the tiles of the previous bank, are no longer needed
#pragma unroll
    for (int i = 0; i < Block::kStages - 1; ++i) load(i);
    for (int tile = 0; tile < segment.num_tiles; ++tile) {
      wait_for_copies<Block::kStages - 2>();
      __syncthreads();  // all copies of this tile have arrived, and the previous tile is no longer needed
      load(tile + Block::kStages - 1);
      if (works) state.add_tile(block, stage, segment.first_key, keys_of(tile));
      segment.first_key += Block::kKeys;
      stage = stage + 1 < Block::kStages ? stage + 1 : 0;
    }
  }
  if (works) state.write(block);
}

}  // namespace fastcssl::infonce::gpu
