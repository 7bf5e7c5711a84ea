// Shared by the kernels: the location of an image in the batch, its parameters, and its mean grey.
#pragma once

#include <cstdint>

#include "photometric.h"
#include "photometric_color.cuh"

namespace fastcssl::views::gpu {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The batch, or the part of it that one launch covers.
struct Crops {
  const std::uint8_t* pixels;
  const float* columns;
  float* sums;  // [image][num_sums], sums of grey on the scale 0..1
  int height, width, num_sums, sum_pixels;

  __device__ const std::uint8_t* image(int index) const {
    return pixels + static_cast<std::int64_t>(index) * height * width * 3;
  }
};

// Computes n / divisor for 0 <= n < 2^31 with one multiplication. `multiplier` is 2^32 * (2^shift - divisor) / divisor
// + 1.
struct Divider {
  unsigned divisor, multiplier, shift;

  explicit Divider(int by) : divisor(static_cast<unsigned>(by)), shift(0) {
    while ((std::uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<unsigned>((((std::uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }
  __device__ unsigned operator()(unsigned n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// Adds the lanes in a fixed tree and returns the sum to all of them.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// Every warp adds up the partial sums on its own, which is faster than a barrier.
__device__ inline Jitter load_jitter_and_mean(const Crops& crops, int image) {
  Jitter jitter = load_jitter(crops.columns + static_cast<std::int64_t>(image) * kNumColumns);
  if (has_contrast(jitter.operations)) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const float* sums = crops.sums + static_cast<std::int64_t>(image) * crops.num_sums;
    const float sum = warp_sum(lane < crops.num_sums ? sums[lane] : 0.0f);
    jitter.contrast_offset = (1.0f - jitter.factor[1]) * (sum / static_cast<float>(crops.height * crops.width));
  }
  return jitter;
}

}  // namespace fastcssl::views::gpu
