// Compiles infonce_kernel.h for AVX2, FMA and F16C. The pragma follows the standard headers, and everything below is in
// an anonymous namespace. Therefore no function that other files share is compiled for instructions that may be
// missing.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "infonce/infonce_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "vector_avx2.h"
// This must follow the vector layer.
#include "infonce_kernel.h"

namespace fastcssl::infonce {

void sweep_avx2(const Sweep& sweep) { run(sweep); }

}  // namespace fastcssl::infonce

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else

namespace fastcssl::infonce {

// Never called, because infonce_cpu.cpp checks the processor first.
void sweep_avx2(const Sweep&) {}

}  // namespace fastcssl::infonce

#endif
