// The three places where CUDA's syntax is not C++: spelled as macros, so that the same .cu also compiles under g++ with
// tests/emulator, which defines them its own way.
#pragma once

#if defined(FASTCSSL_EMULATOR)

#include "cuda_emulator.h"

#else

#define FASTCSSL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define FASTCSSL_SHARED(Type, name) __shared__ Type name
#define FASTCSSL_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

#endif
