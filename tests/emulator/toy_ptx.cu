// Kernels whose races, bank conflicts and sectors are known: what the watch over translated PTX must count.
#include <cuda_runtime.h>

#include <cstdio>
#include <string>
#include <vector>

#include "launch.cuh"

namespace toy {

struct Scratch {
  alignas(16) float values[2048];
};

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }

// data[i] = i's neighbour, through shared memory, `stride` words apart.
template <int kStride, bool kBarrier>
__global__ void exchange(float* data) {
  FASTCSSL_SHARED(Scratch, scratch);
  scratch.values[thread() * kStride] = data[thread()];
  if (kBarrier) __syncthreads();
  data[thread()] = scratch.values[(thread() ^ 1) * kStride];
}

// 16 bytes a lane, in a row: no conflict in quarter warps; rows of 128 bytes read down one column: eight-fold.
template <int kPitch>
__global__ void vectors(float* data) {
  FASTCSSL_SHARED(Scratch, scratch);
  float4* row = reinterpret_cast<float4*>(scratch.values + thread() % 64 * kPitch);
  *row = {1.0f, 2.0f, 3.0f, data[thread()]};
  data[thread()] = row->w;
}

// A sector for each lane instead of one for eight.
__global__ void scattered(float* data) { data[thread() * 8] += 1.0f; }

}  // namespace toy

int main(int, char** argv) {
  const std::string name = argv[1];
  std::vector<float> memory(1024);
  float* data = memory.data();
  while (reinterpret_cast<std::uintptr_t>(data) % 32 != 0) ++data;
  for (int i = 0; i < 64; ++i) data[i] = static_cast<float>(i);
  const auto launch = [&](void (*kernel)(float*), unsigned threads = 64) {
    FASTCSSL_LAUNCH(kernel, 1, threads, 0, nullptr, data);
  };
  if (name == "exchange") launch(toy::exchange<1, true>);
  if (name == "two_apart") launch(toy::exchange<2, true>);
  if (name == "32_apart") launch(toy::exchange<32, true>);
  if (name == "racy") launch(toy::exchange<1, false>);
  if (name == "vectors") launch(toy::vectors<4>);
  if (name == "column") launch(toy::vectors<32>);
  if (name == "scattered") launch(toy::scattered, 32);
  const cudaError_t error = cudaGetLastError();
  for (int i = 0; i < 64; ++i) std::printf("%.9g ", data[i]);
  return error == cudaSuccess ? 0 : 3;
}
