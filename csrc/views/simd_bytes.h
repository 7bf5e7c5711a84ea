// Separates the interleaved bytes of 16 pixels into channels with 128-bit vectors, for both AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace fastcssl::views {
namespace {

using Bytes = __m128i;

// Returns every third of 48 bytes, beginning at `first`. A channel's bytes are at different places in the three
// vectors, so two blends gather them and one shuffle orders them, forwards or backwards.
template <int first>
static inline __attribute__((always_inline)) Bytes every_third(Bytes a, Bytes b, Bytes c, bool flip) {
  struct Table {
    alignas(16) std::uint8_t from_b[16], from_c[16], forwards[16], backwards[16];
    constexpr Table() : from_b(), from_c(), forwards(), backwards() {
      for (int i = 0; i < 16; ++i) {
        const int at = 3 * i + first;
        if (at / 16 == 1) from_b[at % 16] = 0xff;
        if (at / 16 == 2) from_c[at % 16] = 0xff;
        forwards[i] = static_cast<std::uint8_t>(at % 16);
        backwards[15 - i] = forwards[i];
      }
    }
  };
  static constexpr Table table;
  const auto load = reinterpret_cast<const __m128i*>(flip ? table.backwards : table.forwards);
  a = _mm_blendv_epi8(a, b, _mm_load_si128(reinterpret_cast<const __m128i*>(table.from_b)));
  a = _mm_blendv_epi8(a, c, _mm_load_si128(reinterpret_cast<const __m128i*>(table.from_c)));
  return _mm_shuffle_epi8(a, _mm_load_si128(load));
}

static inline __attribute__((always_inline)) void load_channels(const std::uint8_t* p, bool flip, Bytes& r, Bytes& g,
                                                                Bytes& b) {
  const auto* from = reinterpret_cast<const __m128i*>(p);
  const Bytes v0 = _mm_loadu_si128(from), v1 = _mm_loadu_si128(from + 1), v2 = _mm_loadu_si128(from + 2);
  r = every_third<0>(v0, v1, v2, flip);
  g = every_third<1>(v0, v1, v2, flip);
  b = every_third<2>(v0, v1, v2, flip);
}

}  // namespace
}  // namespace fastcssl::views
