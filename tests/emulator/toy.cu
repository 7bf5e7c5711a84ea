// Small kernels that are right or wrong in one way each: what the emulator must compute, and what it must refuse.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <vector>

#include "launch.cuh"

namespace {

constexpr unsigned kAll = 0xffffffffu;

struct Scratch {
  float values[64];
};

// Reverses 64 numbers through shared memory; wrong without the barrier.
__global__ void reverse(float* data) {
  FASTCSSL_SHARED(Scratch, scratch);
  scratch.values[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = scratch.values[63 - threadIdx.x];
}

__global__ void unwritten(float* data) {
  FASTCSSL_SHARED(Scratch, scratch);
  data[threadIdx.x] = scratch.values[threadIdx.x];
}

__global__ void past_shared(float* data) {
  FASTCSSL_SHARED(Scratch, scratch);
  (&scratch.values[0])[threadIdx.x + 1] = data[threadIdx.x];
}

__global__ void past_global(float* data) { data[threadIdx.x + 1] = 0.0f; }

__global__ void past_dynamic(float* data) {
  FASTCSSL_DYNAMIC_SHARED(bytes);
  float* values = reinterpret_cast<float*>(bytes);
  values[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = values[threadIdx.x ^ 1];
}

// Each lane ends with: prefix sum, votes, neighbour's number, rounded through both half types.
__global__ void collectives(float* data) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum = data[threadIdx.x];
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(kAll, sum, distance);
    if (lane >= distance) sum += other;
  }
  const unsigned odd = __ballot_sync(kAll, lane % 2 == 1);
  const float first = __shfl_sync(kAll, sum, 0), mirrored = __shfl_xor_sync(kAll, sum, 31);
  const bool fine = odd == 0xaaaaaaaau && __any_sync(kAll, lane == 7) && !__all_sync(kAll, lane == 7);
  __syncwarp();
  const float half = __half2float(__float2half_rn(2049.0f)) + __bfloat162float(__float2bfloat16_rn(257.0f));
  data[threadIdx.x] = fine && half == 2048.0f + 256.0f ? sum + 1000.0f * first + 1000000.0f * mirrored : -1.0f;
}

__global__ void two_barriers(float*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void half_a_shuffle(float* data) {
  if (threadIdx.x % 32 < 16) {
    data[threadIdx.x] = __shfl_xor_sync(kAll, data[threadIdx.x], 1);
  } else {
    __syncthreads();
  }
}

__global__ void absent_lane(float* data) {
  if (threadIdx.x % 2 == 0) data[threadIdx.x] = __shfl_xor_sync(0x55555555u, data[threadIdx.x], 1);
}

__global__ void two_collectives(float* data) {
  if (threadIdx.x % 2 == 0) {
    __syncwarp();
  } else {
    data[threadIdx.x] = static_cast<float>(__ballot_sync(kAll, true));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  std::vector<float> data(64);
  for (int i = 0; i < 64; ++i) data[i] = static_cast<float>(i + 1);
  data.shrink_to_fit();
  float* numbers = data.data();
  const auto launch = [&](void (*kernel)(float*), std::size_t shared_bytes = 0, unsigned rows = 1) {
    FASTCSSL_LAUNCH(kernel, dim3(1, rows), 64, shared_bytes, nullptr, numbers);
  };
  if (name == "reverse") launch(reverse);
  if (name == "unwritten") launch(unwritten);
  if (name == "past_shared") launch(past_shared);
  if (name == "past_global") launch(past_global);
  if (name == "dynamic") launch(past_dynamic, 64 * sizeof(float));
  if (name == "past_dynamic") launch(past_dynamic, 63 * sizeof(float));
  if (name == "collectives") launch(collectives);
  if (name == "two_barriers") launch(two_barriers);
  if (name == "half_a_shuffle") launch(half_a_shuffle);
  if (name == "absent_lane") launch(absent_lane);
  if (name == "two_collectives") launch(two_collectives);
  if (name == "too_many_rows") launch(reverse, 0, 65536);
  if (name == "too_much_shared") launch(reverse, 49153);
  if (name == "more_shared") {
    cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    launch(reverse, 65536);
  }
  const cudaError_t error = cudaGetLastError();
  for (float number : data) std::printf("%.9g ", number);
  return error == cudaSuccess ? 0 : 3;
}
