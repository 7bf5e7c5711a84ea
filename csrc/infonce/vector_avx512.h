// The vector layer of infonce_kernel.h for AVX-512 F, BW, DQ and VL. vector_portable.h explains each operation.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define FASTCSSL_INLINE static inline __attribute__((always_inline))

namespace fastcssl::infonce {
namespace {

constexpr int kLanes = kLanesAvx512, kWide = kWideAvx512, kSums = 24;

using F = __m512;

FASTCSSL_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
FASTCSSL_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
FASTCSSL_INLINE F set1(float a) { return _mm512_set1_ps(a); }
FASTCSSL_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
FASTCSSL_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
FASTCSSL_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
FASTCSSL_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
FASTCSSL_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
FASTCSSL_INLINE bool any_above(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
FASTCSSL_INLINE F if_above(F a, F b, F yes, F no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
}
FASTCSSL_INLINE F if_equal(F a, F b, F yes, F no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), no, yes);
}
FASTCSSL_INLINE F add_exponent(F a, F n) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), exponent));
}
FASTCSSL_INLINE F from_float16(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FASTCSSL_INLINE F from_bfloat16(const std::uint16_t* p) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

}  // namespace
}  // namespace fastcssl::infonce
