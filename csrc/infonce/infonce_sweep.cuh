// One sweep over the banks: of each row, the sum of exp(logit) over the keys it sees and the so weighted sum of keys.
//
// A block has some rows and, of all key tiles of the banks together, one share (a split): tiles come through a ring of
// asynchronous copies and feed both products. Sums are relative to 2^reference; the reference follows the running
// maximum only when it must, so that the sums are rarely scaled. What a split found is written for `combine`.
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
  __syncthreads();  // segments and queries are whole
  RowState<Block> state(block);
  // A warp whose rows are all past the end helps with the copies only.
  const bool works = block.first_row() + RowState<Block>::row_of(fresh_thread() / kWarp * kWarp, 0, 0) < sweep.num_rows;
  const int tile_bytes = Block::kKeys * sweep.dim * static_cast<int>(sizeof(T));
  for (int b = 0; b < sweep.num_banks; ++b) {
    Segment segment = block.segments[b];
    segment.keys_KD += block.load_offset();
    int load_stage = 0, stage = 0;
    const auto keys_of = [&](int tile) { return tile + 1 < segment.num_tiles ? Block::kKeys : segment.last_keys; };
    const auto load = [&](int tile) {
      if (tile < segment.num_tiles) block.load_keys(load_stage, segment.keys_KD, keys_of(tile));
      commit_copies();  // of nothing after the last tile, so that a group is always a tile
      segment.keys_KD += tile_bytes;
      load_stage = load_stage + 1 < Block::kStages ? load_stage + 1 : 0;
    };
    __syncthreads();  // the factors, or the tiles of the bank before, are done with
#pragma unroll
    for (int i = 0; i < Block::kStages - 1; ++i) load(i);
    for (int tile = 0; tile < segment.num_tiles; ++tile) {
      wait_for_copies<Block::kStages - 2>();
      __syncthreads();  // everybody's copies of this tile have arrived, and the tile before it is done with
      load(tile + Block::kStages - 1);
      if (works) state.add_tile(block, stage, segment.first_key, keys_of(tile));
      segment.first_key += Block::kKeys;
      stage = stage + 1 < Block::kStages ? stage + 1 : 0;
    }
  }
  if (works) state.write(block);
}

}  // namespace fastcssl::infonce::gpu
