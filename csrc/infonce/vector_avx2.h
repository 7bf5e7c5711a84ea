// The vector layer of infonce_kernel.h for AVX2, FMA and F16C. vector_portable.h explains each operation.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define FASTCSSL_INLINE static inline __attribute__((always_inline))

namespace fastcssl::infonce {
namespace {

constexpr int kLanes = kLanesAvx2, kWide = kWideAvx2, kSums = 12;

using F = __m256;

FASTCSSL_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
FASTCSSL_INLINE void store(float* p, F a) { _mm256_storeu_ps(p, a); }
FASTCSSL_INLINE F set1(float a) { return _mm256_set1_ps(a); }
FASTCSSL_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
FASTCSSL_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
FASTCSSL_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
FASTCSSL_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
FASTCSSL_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
FASTCSSL_INLINE bool any_above(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
FASTCSSL_INLINE F if_above(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
FASTCSSL_INLINE F if_equal(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
FASTCSSL_INLINE F add_exponent(F a, F n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
FASTCSSL_INLINE F from_float16(const std::uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FASTCSSL_INLINE F from_bfloat16(const std::uint16_t* p) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

}  // namespace
}  // namespace fastcssl::infonce
