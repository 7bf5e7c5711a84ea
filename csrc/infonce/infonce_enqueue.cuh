// Writes keys into rings, one warp per key. After all keys are written, one thread per ring moves its pointer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../launch.cuh"
#include "infonce.h"
#include "infonce_combine.cuh"

namespace fastcssl::infonce::gpu {

struct Rings {
  Ring rings[kMaxBanks];
  int count;
};

constexpr int kEnqueueThreads = kEnqueueWarps * kWarp;
constexpr float kLeastLength = 1e-12f;  // as in torch.nn.functional.normalize

// Returns the ring's row for a pointer, even if a checkpoint or a caller left the pointer outside the ring.
__device__ inline std::int64_t ring_row(std::int64_t at, std::int64_t num_rows) {
  const std::int64_t row = at % num_rows;
  return row < 0 ? row + num_rows : row;
}

__device__ inline void store_as(Type type, void* rows_KD, std::int64_t at, float value) {
  switch (type) {
    case Type::float32:
      static_cast<float*>(rows_KD)[at] = value;
      return;
    case Type::float16:
      static_cast<__half*>(rows_KD)[at] = __float2half_rn(value);
      return;
    case Type::bfloat16:
      static_cast<__nv_bfloat16*>(rows_KD)[at] = __float2bfloat16_rn(value);
      return;
  }
}

__global__ void __launch_bounds__(kEnqueueThreads) write_keys(const __grid_constant__ Rings rings, int dim) {
  const Ring& ring = rings.rings[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // If there are more keys than rows, the first keys would be overwritten, so they are not written.
  const std::int64_t skipped = ring.num_keys > ring.num_rows ? ring.num_keys - ring.num_rows : 0;
  const std::int64_t key = skipped + static_cast<std::int64_t>(blockIdx.x) * kEnqueueWarps + threadIdx.x / kWarp;
  if (key >= ring.num_keys || ring.num_rows == 0) return;
  const std::int64_t row = ring_row(*ring.pointer + key, ring.num_rows);
  const float* key_D = ring.keys_GD + key * dim;
  float length = 1.0f;
  if (ring.normalise) {
    float squares = 0.0f;
    for (int column = lane; column < dim; column += kWarp) squares += key_D[column] * key_D[column];
    length = fmaxf(sqrtf(warp_total(squares)), kLeastLength);
  }
  for (int column = lane; column < dim; column += kWarp) {
    store_as(ring.type, ring.rows_KD, row * dim + column, key_D[column] / length);
  }
}

__global__ void __launch_bounds__(kWarp) move_pointers(const __grid_constant__ Rings rings) {
  const int index = static_cast<int>(threadIdx.x);
  if (index >= rings.count || rings.rings[index].num_rows == 0) return;
  const Ring& ring = rings.rings[index];
  *ring.pointer = ring_row(*ring.pointer + ring.num_keys, ring.num_rows);
  const std::int64_t filled = *ring.filled + ring.num_keys;
  *ring.filled = filled < ring.num_rows ? filled : ring.num_rows;
}

}  // namespace fastcssl::infonce::gpu
