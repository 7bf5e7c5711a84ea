// Compiles photometric_kernel.h for AVX-512 F, BW, DQ and VL. The pragma follows the standard headers, and everything
// below is in an anonymous namespace. Therefore no function that other files share is compiled for instructions that
// may be missing.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "photometric_plan.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
// GCC 12 warns about its own intrinsics, which leave a masked-out operand undefined (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "simd_avx512.h"
// This must follow the vector layer.
#include "photometric_kernel.h"

namespace fastcssl::views {

void run_avx512(const Plan& plan, const std::uint8_t* crop, void* out, void* scratch) { run(plan, crop, out, scratch); }

}  // namespace fastcssl::views

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else

namespace fastcssl::views {

// Never called, because photometric_cpu.cpp checks the processor first.
void run_avx512(const Plan&, const std::uint8_t*, void*, void*) {}

}  // namespace fastcssl::views

#endif
