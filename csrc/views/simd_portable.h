// The vector layer of photometric_kernel.h in plain C++, which defines the operations of simd_avx2.h and simd_avx512.h.
#pragma once

#include <cstdint>
#include <cstring>

#define FASTCSSL_INLINE static inline
#define FASTCSSL_MEMBER inline

namespace fastcssl::views {
namespace {

constexpr int kLanes = 4;

// 128-bit vector types of GCC and Clang. Every 64-bit processor has registers for them.
typedef float F __attribute__((vector_size(16)));           // kLanes floats
typedef std::int16_t I16 __attribute__((vector_size(16)));  // 2 * kLanes integers
typedef std::uint16_t U16 __attribute__((vector_size(16)));
typedef std::int32_t I32 __attribute__((vector_size(16)));
typedef std::int16_t Half __attribute__((vector_size(8)));
struct Acc {  // 2 * kLanes sums, in the order that suits the instruction set
  I32 low, high;
};
struct Weights {
  I32 first, second;
};
struct Bytes {  // one channel of 16 pixels
  std::uint8_t v[16];
};

FASTCSSL_INLINE F set1(float a) { return F{a, a, a, a}; }
FASTCSSL_INLINE F add(F a, F b) { return a + b; }
FASTCSSL_INLINE F sub(F a, F b) { return a - b; }
FASTCSSL_INLINE F mul(F a, F b) { return a * b; }
FASTCSSL_INLINE F div(F a, F b) { return a / b; }
FASTCSSL_INLINE F min(F a, F b) { return a < b ? a : b; }
FASTCSSL_INLINE F max(F a, F b) { return a > b ? a : b; }
FASTCSSL_INLINE F fma(F a, F b, F c) { return a * b + c; }
FASTCSSL_INLINE F fnma(F a, F b, F c) { return c - a * b; }
FASTCSSL_INLINE F abs(F a) { return max(a, -a); }
FASTCSSL_INLINE F floor(F a) {
  const F whole = __builtin_convertvector(__builtin_convertvector(a, I32), F);  // rounds towards zero
  return whole > a ? whole - 1.0f : whole;
}
FASTCSSL_INLINE F if_equal(F a, F b, F yes, F no) { return a == b ? yes : no; }
FASTCSSL_INLINE F if_at_least(F a, F b, F yes, F no) { return a >= b ? yes : no; }
FASTCSSL_INLINE float sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }

// Separates 16 interleaved pixels into three channels, last pixel first if `flip` is true.
FASTCSSL_INLINE void load_channels(const std::uint8_t* p, bool flip, Bytes& r, Bytes& g, Bytes& b) {
  for (int i = 0; i < 16; ++i) {
    const std::uint8_t* pixel = p + 3 * (flip ? 15 - i : i);
    r.v[i] = pixel[0], g.v[i] = pixel[1], b.v[i] = pixel[2];
  }
}

// Returns pixels part * kLanes .. (part + 1) * kLanes - 1 of the 16.
FASTCSSL_INLINE F to_float(const Bytes& a, int part) {
  const std::uint8_t* v = a.v + part * kLanes;
  return __builtin_convertvector((I32{v[0], v[1], v[2], v[3]}), F);
}

FASTCSSL_INLINE I16 load16(const std::int16_t* p) {
  I16 out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
FASTCSSL_INLINE void store16(std::int16_t* p, I16 a) { std::memcpy(p, &a, sizeof a); }
// Uses unsigned arithmetic, because the lanes past the end of a row hold arbitrary values and may overflow.
FASTCSSL_INLINE I16 add16(I16 a, I16 b) { return (I16)((U16)a + (U16)b); }

// Stores kLanes floats as rounded int16 at p. Adding 1.5 * 2^23 leaves the rounded number in the low bits.
FASTCSSL_INLINE void store_rounded(std::int16_t* p, F a) {
  const F shifted = a + 12582912.0f;
  I32 bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::int16_t>(bits[i]);
}

FASTCSSL_INLINE Weights make_weights(std::int16_t first, std::int16_t second) {
  return {I32{} + first, I32{} + second};
}

FASTCSSL_INLINE Acc start(std::int32_t value) { return {I32{} + value, I32{} + value}; }

FASTCSSL_INLINE I32 low_half(I16 a) { return __builtin_convertvector((Half{a[0], a[1], a[2], a[3]}), I32); }
FASTCSSL_INLINE I32 high_half(I16 a) { return __builtin_convertvector((Half{a[4], a[5], a[6], a[7]}), I32); }

// Returns acc + first weight * a + second weight * b.
FASTCSSL_INLINE Acc accumulate(Acc acc, I16 a, I16 b, Weights w) {
  return {acc.low + low_half(a) * w.first + low_half(b) * w.second,
          acc.high + high_half(a) * w.first + high_half(b) * w.second};
}

// Returns the sums >> 16, in the order of the lanes.
FASTCSSL_INLINE I16 narrow(Acc acc) {
  I16 out;
  for (int i = 0; i < kLanes; ++i) {
    out[i] = static_cast<std::int16_t>(acc.low[i] >> 16);
    out[kLanes + i] = static_cast<std::int16_t>(acc.high[i] >> 16);
  }
  return out;
}

// Converts the sums to floats, in the order of the lanes.
FASTCSSL_INLINE void widen(Acc acc, F& first, F& second) {
  first = __builtin_convertvector(acc.low, F);
  second = __builtin_convertvector(acc.high, F);
}

// Interleaves three channels of kLanes pixels into 3 * kLanes values.
FASTCSSL_INLINE void interleave(F r, F g, F b, F (&out)[3]) {
  out[0] = F{r[0], g[0], b[0], r[1]};
  out[1] = F{g[1], b[1], r[2], g[2]};
  out[2] = F{b[2], r[3], g[3], b[3]};
}

FASTCSSL_INLINE void store_float32(void* p, F a) { std::memcpy(p, &a, sizeof a); }

FASTCSSL_INLINE void store_bfloat16(void* p, F a) {
  std::uint16_t out[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    std::uint32_t bits;
    const float value = a[i];
    std::memcpy(&bits, &value, 4);
    out[i] = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  std::memcpy(p, out, sizeof out);
}

FASTCSSL_INLINE std::uint16_t to_half(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits >= 0x477ff000) return static_cast<std::uint16_t>(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves the result, rounded to even, in the low bits
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<std::uint16_t>(sign | (bits - 0x3f000000));
  }
  return static_cast<std::uint16_t>(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

FASTCSSL_INLINE void store_float16(void* p, F a) {
  std::uint16_t out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = to_half(a[i]);
  std::memcpy(p, out, sizeof out);
}

}  // namespace
}  // namespace fastcssl::views
