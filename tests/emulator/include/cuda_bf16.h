// __nv_bfloat16 with the conversions that our sources use.
#pragma once

#include "cuda_emulator.h"

struct __nv_bfloat16 {
  unsigned short bits;
};

// To nearest, ties to even; NaN stays NaN.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(unsigned{value.bits} << 16); }

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
