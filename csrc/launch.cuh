// Macros for the three places where CUDA's syntax is not C++, and the error that a launch left behind. The same .cu
// files also compile with g++ and tests/emulator, which has its own definitions of these macros.
#pragma once

#include <cuda_runtime.h>

#include "device/failure.h"

#if defined(FASTCSSL_EMULATOR)

#include "cuda_emulator.h"

#else

#define FASTCSSL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define FASTCSSL_SHARED(Type, name) __shared__ Type name
#define FASTCSSL_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

#endif

namespace fastcssl {

// Of the launch just before: `kernel` is its name, for whoever reads the error.
inline device::Failure launched(const char* kernel) { return {static_cast<int>(cudaGetLastError()), kernel}; }

}  // namespace fastcssl
