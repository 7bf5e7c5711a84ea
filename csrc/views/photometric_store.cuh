// The last steps: solarize, normalise, convert, and store a run of elements with full-width stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "photometric_color.cuh"

namespace fastcssl::views::gpu {

constexpr int kVectorBytes = 16;

// Computes (x / 255 - mean) / std as one multiply-add on the scale 0..1.
struct Affine {
  float scale[3], shift[3];
};

__device__ inline float finish(float value, float solarize, float scale, float shift) {
  return fmaf(value >= solarize ? 1.0f - value : value, scale, shift);
}

// Scales the threshold like the pixels, with the same rounding, so that equal levels still compare equal.
__device__ inline float load_solarize(const float* __restrict__ columns) {
  return __ldg(columns + kSolarize) * kPerLevel;
}

__device__ inline void convert(float value, float* out) { *out = value; }
__device__ inline void convert(float value, __nv_bfloat16* out) { *out = __float2bfloat16_rn(value); }
__device__ inline void convert(float value, __half* out) { *out = __float2half_rn(value); }

// Returns where to stage a run in a 16-byte aligned buffer, so that its vectors are aligned there and at `destination`.
template <typename T>
__device__ inline T* staging_place(unsigned char* buffer, const T* destination) {
  return reinterpret_cast<T*>(buffer + (reinterpret_cast<std::uintptr_t>(destination) & (kVectorBytes - 1)));
}

// `num_workers` threads copy a staged run to memory, 16 bytes at a time except at its two unaligned ends.
template <typename T>
__device__ inline void copy_run(T* destination, const T* staged, int count, int worker, int num_workers) {
  constexpr int kPerVector = kVectorBytes / static_cast<int>(sizeof(T));
  const int offset = static_cast<int>(reinterpret_cast<std::uintptr_t>(destination) & (kVectorBytes - 1));
  int head = offset == 0 ? 0 : (kVectorBytes - offset) / static_cast<int>(sizeof(T));
  head = head < count ? head : count;
  const int num_vectors = (count - head) / kPerVector;
  if (worker < head) destination[worker] = staged[worker];
  const uint4* from = reinterpret_cast<const uint4*>(staged + head);
  uint4* to = reinterpret_cast<uint4*>(destination + head);
  for (int i = worker; i < num_vectors; i += num_workers) to[i] = from[i];
  const int last = head + num_vectors * kPerVector + worker;
  if (last < count) destination[last] = staged[last];
}

}  // namespace fastcssl::views::gpu
