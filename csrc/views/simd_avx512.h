// The vector layer of photometric_kernel.h for AVX-512 F, BW, DQ and VL. simd_portable.h explains each operation.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_bytes.h"

#define FASTCSSL_INLINE static inline __attribute__((always_inline))
#define FASTCSSL_MEMBER inline __attribute__((always_inline))

namespace fastcssl::views {
namespace {

constexpr int kLanes = 16;

using F = __m512;
using I16 = __m512i;
using Weights = __m512i;
struct Acc {  // `low` has sums 0-3, 8-11, 16-19 and 24-27, `high` the rest: unpacking works within 128 bits
  __m512i low, high;
};

FASTCSSL_INLINE F set1(float a) { return _mm512_set1_ps(a); }
FASTCSSL_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
FASTCSSL_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
FASTCSSL_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
FASTCSSL_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
FASTCSSL_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
FASTCSSL_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
FASTCSSL_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
FASTCSSL_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
FASTCSSL_INLINE F abs(F a) { return _mm512_abs_ps(a); }
FASTCSSL_INLINE F floor(F a) { return _mm512_floor_ps(a); }
FASTCSSL_INLINE F if_equal(F a, F b, F yes, F no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), no, yes);
}
FASTCSSL_INLINE F if_at_least(F a, F b, F yes, F no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), no, yes);
}
FASTCSSL_INLINE float sum(F a) { return _mm512_reduce_add_ps(a); }

FASTCSSL_INLINE F to_float(Bytes a, int) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a)); }

FASTCSSL_INLINE I16 load16(const std::int16_t* p) { return _mm512_loadu_si512(p); }
FASTCSSL_INLINE void store16(std::int16_t* p, I16 a) { _mm512_storeu_si512(p, a); }
FASTCSSL_INLINE I16 add16(I16 a, I16 b) { return _mm512_add_epi16(a, b); }

FASTCSSL_INLINE void store_rounded(std::int16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}

FASTCSSL_INLINE Weights make_weights(std::int16_t first, std::int16_t second) {
  return _mm512_set1_epi32(static_cast<std::uint16_t>(first) | (second << 16));
}

FASTCSSL_INLINE Acc start(std::int32_t value) { return {_mm512_set1_epi32(value), _mm512_set1_epi32(value)}; }

FASTCSSL_INLINE Acc accumulate(Acc acc, I16 a, I16 b, Weights w) {
  acc.low = _mm512_add_epi32(acc.low, _mm512_madd_epi16(_mm512_unpacklo_epi16(a, b), w));
  acc.high = _mm512_add_epi32(acc.high, _mm512_madd_epi16(_mm512_unpackhi_epi16(a, b), w));
  asm("" : "+v"(acc.low), "+v"(acc.high));  // otherwise GCC regroups the sums and runs out of registers
  return acc;
}

FASTCSSL_INLINE I16 narrow(Acc acc) {
  return _mm512_packs_epi32(_mm512_srai_epi32(acc.low, 16), _mm512_srai_epi32(acc.high, 16));
}

FASTCSSL_INLINE void widen(Acc acc, F& first, F& second) {
  const __m512i to_first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i to_second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  first = _mm512_cvtepi32_ps(_mm512_permutex2var_epi64(acc.low, to_first, acc.high));
  second = _mm512_cvtepi32_ps(_mm512_permutex2var_epi64(acc.low, to_second, acc.high));
}

// As in simd_avx2.h, lane i of a permuted channel holds the only value of it that any of the three results needs there.
FASTCSSL_INLINE void interleave(F r, F g, F b, F (&out)[3]) {
  r = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5), r);
  g = _mm512_permutexvar_ps(_mm512_setr_epi32(5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10), g);
  b = _mm512_permutexvar_ps(_mm512_setr_epi32(10, 5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15), b);
  out[0] = _mm512_mask_blend_ps(0x4924, _mm512_mask_blend_ps(0x2492, r, g), b);
  out[1] = _mm512_mask_blend_ps(0x2492, _mm512_mask_blend_ps(0x9249, r, g), b);
  out[2] = _mm512_mask_blend_ps(0x9249, _mm512_mask_blend_ps(0x4924, r, g), b);
}

FASTCSSL_INLINE void store_float32(void* p, F a) { _mm512_storeu_ps(p, a); }

FASTCSSL_INLINE void store_bfloat16(void* p, F a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

FASTCSSL_INLINE void store_float16(void* p, F a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace fastcssl::views
