// The Gaussian blur in one direction: its weights, and the filter for several neighbouring outputs of one thread.
#pragma once

#include "photometric_batch.cuh"

namespace fastcssl::views::gpu {

constexpr int kOutputs = 8;  // neighbours that a thread filters together, reading each input from shared memory once

__device__ inline int radius_of(float sigma) { return static_cast<int>(fminf(ceilf(5.5f * sigma), kMaxRadius)); }

// The first warp writes exp(-d^2 / 2 sigma^2), normalised, to weights[1 + tap].
__device__ inline void make_weights(float* weights, float sigma, int radius, int lane) {
  const float distance = static_cast<float>(lane - radius) / sigma;
  const float weight = lane <= 2 * radius ? expf(-0.5f * distance * distance) : 0.0f;
  const float sum = warp_sum(weight);
  if (lane <= 2 * radius) weights[1 + lane] = weight / sum;
}

struct RowReader {
  const float* next_value;

  __device__ float next() { return *next_value++; }
};

template <int kRows, int kPitch>
struct RingReader {
  const float* column;
  int row;

  __device__ float next() {
    const float value = column[row * kPitch];
    row = row + 1 == kRows ? 0 : row + 1;
    return value;
  }
};

// out[j] = sum over taps t of weights[1 + t] * input[j + t]. The last kOutputs inputs stay in registers at rotating
// positions. Unrolling eight taps makes every position a constant.
template <class Reader>
__device__ inline void filter(Reader reader, const float* weights, int radius, float (&out)[kOutputs]) {
  float window[kOutputs];
#pragma unroll
  for (int j = 0; j < kOutputs; ++j) window[j] = reader.next();
  const float first = weights[1];
#pragma unroll
  for (int j = 0; j < kOutputs; ++j) out[j] = first * window[j];
  const float2* pair = reinterpret_cast<const float2*>(weights + 2);
  for (int pairs = radius;;) {
#pragma unroll
    for (int tap = 1; tap < kOutputs; tap += 2) {
      if (pairs-- == 0) return;
      const float2 weight = *pair++;
      window[tap - 1] = reader.next();
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) out[j] = fmaf(weight.x, window[(tap + j) % kOutputs], out[j]);
      window[tap] = reader.next();
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) out[j] = fmaf(weight.y, window[(tap + 1 + j) % kOutputs], out[j]);
    }
  }
}

}  // namespace fastcssl::views::gpu
