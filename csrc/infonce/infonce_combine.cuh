// Combines the splits and the positives into losses and gradients, one block per row. Every sum has a fixed order.
#pragma once

#include <cmath>
#include <cstdint>

#include "../launch.cuh"
#include "infonce_sweep.cuh"

namespace fastcssl::infonce::gpu {

struct Combine {
  const float* scaled_MD;
  const float* positive_MD;
  const float* sums_SMD;
  const float2* weights_MS;
  std::int64_t num_rows;
  int dim, num_splits;
  bool positive_in_denominator;
  float* loss_M;
  float* by_scaled_MD;    // or null
  float* by_positive_MD;  // or null
};

constexpr int kCombineThreads = kCombineWarps * kWarp;
static_assert(kCombineThreads >= kMaxDim, "one column per thread");
constexpr float kLn2 = 0.6931471805599453f;

struct CombineShared {
  alignas(16) float sums[kCombineWarps][kMaxDim];
  float weights[kCombineWarps], products[kCombineWarps];
};

__device__ inline float warp_total(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

__global__ void __launch_bounds__(kCombineThreads) combine_splits(const __grid_constant__ Combine combine) {
  FASTCSSL_SHARED(CombineShared, shared);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const std::int64_t row = blockIdx.x;
  const int dim = combine.dim, num_splits = combine.num_splits;
  const float2* weights_S = combine.weights_MS + row * num_splits;

  float reference = kNone;
  for (int split = lane; split < num_splits; split += kWarp) {
    const float2 found = weights_S[split];
    if (found.y != 0.0f) reference = fmaxf(reference, found.x);
  }
  reference = warp_max(reference);

  // Each warp handles every eighth split, each lane eight columns.
  constexpr int kRuns = kMaxDim / (kWarp * 4);
  float4 sums[kRuns] = {};
  float weight = 0.0f;
  for (int split = warp; split < num_splits; split += kCombineWarps) {
    const float2 found = weights_S[split];
    if (found.y == 0.0f) continue;  // the split wrote no sums
    const float scale = power_of_two(found.x - reference);
    weight += found.y * scale;
    const float* sums_D = combine.sums_SMD + (split * combine.num_rows + row) * dim;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int column = (i * kWarp + lane) * 4;
      if (column >= dim) continue;
      const float4 run = *reinterpret_cast<const float4*>(sums_D + column);
      sums[i].x += run.x * scale;
      sums[i].y += run.y * scale;
      sums[i].z += run.z * scale;
      sums[i].w += run.w * scale;
    }
  }
#pragma unroll
  for (int i = 0; i < kRuns; ++i) *reinterpret_cast<float4*>(&shared.sums[warp][(i * kWarp + lane) * 4]) = sums[i];
  const bool inside = thread < dim;
  const float scaled = inside ? combine.scaled_MD[row * dim + thread] : 0.0f;
  const float positive = inside ? combine.positive_MD[row * dim + thread] : 0.0f;
  const float product = warp_total(scaled * positive);
  if (lane == 0) {
    shared.weights[warp] = weight;
    shared.products[warp] = product;
  }
  __syncthreads();  // the results of all warps are written

  float total = 0.0f, logit = 0.0f;
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) {
    total += shared.weights[w];
    logit += shared.products[w];
  }
  // The gradient's weight is 1 without the positive in the denominator, and 1 - the positive's probability with it.
  const bool sees = total != 0.0f;
  const float excess = (reference + log2f(total)) * kLn2 - logit;
  const float small = expf(-fabsf(excess));
  float loss = excess, share = 1.0f;
  if (combine.positive_in_denominator) {
    loss = fmaxf(excess, 0.0f) + log1pf(small);
    if (excess != excess) loss = excess;
    share = (excess >= 0.0f ? 1.0f : small) / (1.0f + small);
  }
  if (thread == 0) combine.loss_M[row] = sees ? loss : 0.0f;
  if (!inside) return;
  if (combine.by_scaled_MD != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) sum += shared.sums[w][thread];
    combine.by_scaled_MD[row * dim + thread] = sees ? share * (sum / total - positive) : 0.0f;
  }
  if (combine.by_positive_MD != nullptr) combine.by_positive_MD[row * dim + thread] = sees ? -share * scaled : 0.0f;
}

}  // namespace fastcssl::infonce::gpu
