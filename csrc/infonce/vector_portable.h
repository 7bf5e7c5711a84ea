// The vector layer of infonce_kernel.h in plain C++, which defines the operations of vector_avx2.h and vector_avx512.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

#define FASTCSSL_INLINE static inline __attribute__((always_inline))

namespace fastcssl::infonce {
namespace {

// The lanes of a vector, the vectors of the widest panel, and the sums that fit into the registers.
constexpr int kLanes = kLanesPortable, kWide = kWidePortable, kSums = 8;

// 128-bit vector types of GCC and Clang. Every 64-bit processor has registers for them.
typedef float F __attribute__((vector_size(16)));
typedef std::uint32_t U __attribute__((vector_size(16)));

FASTCSSL_INLINE F load(const float* p) {
  F out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
FASTCSSL_INLINE void store(float* p, F a) { std::memcpy(p, &a, sizeof a); }
FASTCSSL_INLINE F set1(float a) { return F{a, a, a, a}; }
FASTCSSL_INLINE F add(F a, F b) { return a + b; }
FASTCSSL_INLINE F sub(F a, F b) { return a - b; }
FASTCSSL_INLINE F mul(F a, F b) { return a * b; }
FASTCSSL_INLINE F max(F a, F b) { return a > b ? a : b; }  // b if either is NaN
FASTCSSL_INLINE F fma(F a, F b, F c) { return a * b + c; }
FASTCSSL_INLINE bool any_above(F a, F b) {
  const auto above = a > b;
  return (above[0] | above[1] | above[2] | above[3]) != 0;
}
FASTCSSL_INLINE F if_above(F a, F b, F yes, F no) { return a > b ? yes : no; }
FASTCSSL_INLINE F if_equal(F a, F b, F yes, F no) { return a == b ? yes : no; }
// Returns a x 2^n, where the low bits of `n` hold n, as they do after adding 1.5 x 2^23.
FASTCSSL_INLINE F add_exponent(F a, F n) { return (F)((U)a + ((U)n << 23)); }
FASTCSSL_INLINE F from_float16(const std::uint16_t* p) {
  return F{float_of_half(p[0]), float_of_half(p[1]), float_of_half(p[2]), float_of_half(p[3])};
}
FASTCSSL_INLINE F from_bfloat16(const std::uint16_t* p) {
  return F{float_of_bfloat(p[0]), float_of_bfloat(p[1]), float_of_bfloat(p[2]), float_of_bfloat(p[3])};
}

}  // namespace
}  // namespace fastcssl::infonce
