// __half with the conversions that our sources use; g++'s _Float16 rounds to nearest, ties to even.
#pragma once

#include "cuda_emulator.h"

struct __half {
  unsigned short bits;
};

inline __half __float2half_rn(float value) {
  const _Float16 rounded = static_cast<_Float16>(value);
  __half out;
  std::memcpy(&out.bits, &rounded, sizeof out.bits);
  return out;
}
inline float __half2float(__half value) {
  _Float16 half;
  std::memcpy(&half, &value.bits, sizeof half);
  return static_cast<float>(half);
}

struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 value) { return {__half2float(value.x), __half2float(value.y)}; }
