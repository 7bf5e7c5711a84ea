// Compiles photometric_kernel.h for AVX2 with FMA and F16C. The pragma follows the standard headers, and everything
// below is in an anonymous namespace. Therefore no function that other files share is compiled for instructions that
// may be missing.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "photometric_plan.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_avx2.h"
// This must follow the vector layer.
#include "photometric_kernel.h"

namespace fastcssl::views {

void run_avx2(const Plan& plan, const std::uint8_t* crop, void* out, void* scratch) { run(plan, crop, out, scratch); }

}  // namespace fastcssl::views

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else

namespace fastcssl::views {

// Never called, because photometric_cpu.cpp checks the processor first.
void run_avx2(const Plan&, const std::uint8_t*, void*, void*) {}

}  // namespace fastcssl::views

#endif
