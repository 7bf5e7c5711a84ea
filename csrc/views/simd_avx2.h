// The vector layer of photometric_kernel.h for AVX2 with FMA and F16C. simd_portable.h explains each operation.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_bytes.h"

#define FASTCSSL_INLINE static inline __attribute__((always_inline))
#define FASTCSSL_MEMBER inline __attribute__((always_inline))

namespace fastcssl::views {
namespace {

constexpr int kLanes = 8;

using F = __m256;
using I16 = __m256i;
using Weights = __m256i;
struct Acc {  // `low` has sums 0-3 and 8-11, `high` the rest, because unpacking works within 128-bit halves
  __m256i low, high;
};

FASTCSSL_INLINE F set1(float a) { return _mm256_set1_ps(a); }
FASTCSSL_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
FASTCSSL_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
FASTCSSL_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
FASTCSSL_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
FASTCSSL_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
FASTCSSL_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
FASTCSSL_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
FASTCSSL_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
FASTCSSL_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
FASTCSSL_INLINE F floor(F a) { return _mm256_floor_ps(a); }
FASTCSSL_INLINE F if_equal(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
FASTCSSL_INLINE F if_at_least(F a, F b, F yes, F no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}

FASTCSSL_INLINE float sum(F a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

FASTCSSL_INLINE F to_float(Bytes a, int part) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(part ? _mm_unpackhi_epi64(a, a) : a));
}

FASTCSSL_INLINE I16 load16(const std::int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
FASTCSSL_INLINE void store16(std::int16_t* p, I16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
FASTCSSL_INLINE I16 add16(I16 a, I16 b) { return _mm256_add_epi16(a, b); }

FASTCSSL_INLINE void store_rounded(std::int16_t* p, F a) {
  const __m256i wide = _mm256_cvtps_epi32(a);
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

FASTCSSL_INLINE Weights make_weights(std::int16_t first, std::int16_t second) {
  return _mm256_set1_epi32(static_cast<std::uint16_t>(first) | (second << 16));
}

FASTCSSL_INLINE Acc start(std::int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }

FASTCSSL_INLINE Acc accumulate(Acc acc, I16 a, I16 b, Weights w) {
  acc.low = _mm256_add_epi32(acc.low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), w));
  acc.high = _mm256_add_epi32(acc.high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), w));
  asm("" : "+x"(acc.low), "+x"(acc.high));  // otherwise GCC regroups the sums and runs out of registers
  return acc;
}

FASTCSSL_INLINE I16 narrow(Acc acc) {
  return _mm256_packs_epi32(_mm256_srai_epi32(acc.low, 16), _mm256_srai_epi32(acc.high, 16));
}

FASTCSSL_INLINE void widen(Acc acc, F& first, F& second) {
  first = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(acc.low, acc.high, 0x20));
  second = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(acc.low, acc.high, 0x31));
}

// The values of a channel go to every third place, and to different lanes in each of the three results. Therefore one
// permutation of each channel serves all three.
FASTCSSL_INLINE void interleave(F r, F g, F b, F (&out)[3]) {
  r = _mm256_permutevar8x32_ps(r, _mm256_setr_epi32(0, 3, 6, 1, 4, 7, 2, 5));
  g = _mm256_permutevar8x32_ps(g, _mm256_setr_epi32(5, 0, 3, 6, 1, 4, 7, 2));
  b = _mm256_permutevar8x32_ps(b, _mm256_setr_epi32(2, 5, 0, 3, 6, 1, 4, 7));
  out[0] = _mm256_blend_ps(_mm256_blend_ps(r, g, 0x92), b, 0x24);
  out[1] = _mm256_blend_ps(_mm256_blend_ps(r, g, 0x24), b, 0x49);
  out[2] = _mm256_blend_ps(_mm256_blend_ps(r, g, 0x49), b, 0x92);
}

FASTCSSL_INLINE void store_float32(void* p, F a) { _mm256_storeu_ps(static_cast<float*>(p), a); }

FASTCSSL_INLINE void store_bfloat16(void* p, F a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i upper = _mm256_srli_epi32(rounded, 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
  _mm_storeu_si128(static_cast<__m128i*>(p), packed);
}

FASTCSSL_INLINE void store_float16(void* p, F a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace fastcssl::views
