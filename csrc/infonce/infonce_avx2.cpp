// infonce_kernel.h for AVX2, FMA and F16C. The pragma follows the standard headers and everything below is in an
// anonymous namespace, so that no function shared with other files is compiled for instructions that may be missing.
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
// After the vector layer.
#include "infonce_kernel.h"

namespace fastcssl::infonce {

void sweep_avx2(const Sweep& sweep) { run(sweep); }

}  // namespace fastcssl::infonce

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else

namespace fastcssl::infonce {

// Never chosen: infonce_cpu.cpp asks the processor first.
void sweep_avx2(const Sweep&) {}

}  // namespace fastcssl::infonce

#endif
