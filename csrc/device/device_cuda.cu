#include <cuda_runtime.h>

#include "device.h"

namespace fastcssl::device {
namespace {

constexpr int kNumThreads = 32;

__global__ void count_up(int* out) { out[threadIdx.x] = static_cast<int>(threadIdx.x) + 1; }

cudaError_t launch_and_sum(int* sum) {
  int* numbers = nullptr;
  cudaError_t error = cudaMalloc(&numbers, kNumThreads * sizeof(int));
  if (error != cudaSuccess) return error;
  int host[kNumThreads] = {0};
  count_up<<<1, kNumThreads>>>(numbers);
  error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaMemcpy(host, numbers, sizeof host, cudaMemcpyDeviceToHost);
  cudaFree(numbers);
  *sum = 0;
  for (int number : host) *sum += number;
  return error;
}

}  // namespace

CudaStatus cuda_status() {
  CudaStatus status;
  status.built = true;
  status.toolkit = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  status.architectures = FASTCSSL_CUDA_ARCHITECTURES;
  cudaError_t error = cudaGetDeviceCount(&status.num_devices);
  int sum = 0;
  if (error == cudaSuccess && status.num_devices > 0) error = launch_and_sum(&sum);
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears the error, so that a later call does not report it
    status.problem = cudaGetErrorString(error);
  } else if (status.num_devices == 0) {
    status.problem = "no CUDA device is visible";
  } else if (sum != kNumThreads * (kNumThreads + 1) / 2) {
    status.problem = "a kernel ran but returned wrong numbers";
  }
  return status;
}

}  // namespace fastcssl::device
