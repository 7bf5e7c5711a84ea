// Converts single numbers between float32 and float16 or bfloat16, rounding to the nearest (ties to even).
#pragma once

#include <cstdint>
#include <cstring>

namespace fastcssl::infonce {
namespace {

inline float as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t as_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_bfloat(std::uint16_t half) { return as_float(std::uint32_t{half} << 16); }

inline float float_of_half(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // infinity or NaN
  // The exponent is 112 too small. A product corrects it, also for subnormal numbers.
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}

inline std::uint16_t bfloat_of_float(float value) {
  const std::uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline std::uint16_t half_of_float(float value) {
  const std::uint32_t sign = as_bits(value) >> 16 & 0x8000, bits = as_bits(value) & 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves the result, rounded, in the low bits
    return static_cast<std::uint16_t>(sign | (as_bits(as_float(bits) + 0.5f) & 0xffff));
  }
  return static_cast<std::uint16_t>(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

}  // namespace
}  // namespace fastcssl::infonce
