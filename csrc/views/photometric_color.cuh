// The operations on single pixels. Colours are on the scale 0..1 here, because clamping to it is free on the GPU.
#pragma once

#include <cstdint>

#include "photometric.h"

namespace fastcssl::views::gpu {

constexpr float kPerLevel = 1.0f / 255.0f;

struct Pixel {
  float r, g, b;
};

// torchvision's weights, which add up to 0.9999.
__device__ inline float grey_of(const Pixel& pixel) {
  return fmaf(0.2989f, pixel.r, fmaf(0.587f, pixel.g, 0.114f * pixel.b));
}

__device__ inline Pixel unpack(unsigned rgb) {
  return {static_cast<float>(rgb & 255u) * kPerLevel, static_cast<float>(rgb >> 8 & 255u) * kPerLevel,
          static_cast<float>(rgb >> 16 & 255u) * kPerLevel};
}

// Makes three loads of one byte. The 32 pixels of a warp are 96 consecutive bytes, so the three loads touch the same
// sectors and L1 serves the second and third. Wider loads need an alignment that odd widths and flips do not have.
__device__ inline unsigned load_rgb(const std::uint8_t* __restrict__ pixel) {
  return __ldg(pixel) | static_cast<unsigned>(__ldg(pixel + 1)) << 8 | static_cast<unsigned>(__ldg(pixel + 2)) << 16;
}

// Packs eight rows of kOrders into one word with two bits per operation, because device code cannot index a host array.
constexpr std::uint64_t pack_orders(int first) {
  std::uint64_t packed = 0;
  for (int row = 0; row < 8; ++row) {
    for (int i = 0; i < 4; ++i) packed |= std::uint64_t{kOrders[first + row][i]} << (8 * row + 2 * i);
  }
  return packed;
}
constexpr std::uint64_t kPackedOrders0 = pack_orders(0), kPackedOrders1 = pack_orders(8);
constexpr std::uint64_t kPackedOrders2 = pack_orders(16);

// The colour jitter of one image. It is the same in every thread of a block, so branches on it do not diverge.
struct Jitter {
  float factor[3];        // brightness, contrast, saturation
  float sextants;         // hue shift in sixths of a turn
  float contrast_offset;  // added by contrast: (1 - factor) * mean grey
  unsigned operations;    // 1 brightness, 2 contrast, 3 saturation, 4 hue; four bits each, lowest first; 0 ends
};
enum Operation : unsigned { kOpBrightness = 1, kOpContrast = 2, kOpSaturation = 3, kOpHue = 4 };

// Omits neutral operations, so that they cost nothing and change no bit.
__device__ inline Jitter load_jitter(const float* __restrict__ columns) {
  Jitter jitter;
  for (int i = 0; i < 3; ++i) jitter.factor[i] = __ldg(columns + kBrightness + i);
  const float hue = __ldg(columns + kHue);
  jitter.sextants = 6.0f * hue;
  jitter.contrast_offset = 0.0f;
  const int order = static_cast<int>(fminf(fmaxf(__ldg(columns + kOrder), 0.0f), 23.0f));
  const std::uint64_t packed = order < 8 ? kPackedOrders0 : order < 16 ? kPackedOrders1 : kPackedOrders2;
  const unsigned row = static_cast<unsigned>(packed >> (8 * (order & 7))) & 255u;
  jitter.operations = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const unsigned which = row >> (2 * i) & 3u;
    const float value = which == 0 ? jitter.factor[0] : which == 1 ? jitter.factor[1] : jitter.factor[2];
    const bool neutral = which == 3 ? hue == 0.0f : value == 1.0f;
    if (!neutral) jitter.operations = jitter.operations << 4 | (which + 1u);
  }
  return jitter;
}

__device__ inline bool has_contrast(unsigned operations) {
  bool found = false;
#pragma unroll
  for (int shift = 0; shift < 16; shift += 4) found = found || (operations >> shift & 15u) == kOpContrast;
  return found;
}

__device__ inline unsigned before_contrast(unsigned operations) {
  unsigned kept = 0;
  for (int shift = 0; shift < 16 && (operations >> shift & 15u) != kOpContrast; shift += 4) {
    kept |= operations & 15u << shift;
  }
  return kept;
}

__device__ inline void blend(Pixel& pixel, float factor, float offset) {
  pixel.r = __saturatef(fmaf(factor, pixel.r, offset));
  pixel.g = __saturatef(fmaf(factor, pixel.g, offset));
  pixel.b = __saturatef(fmaf(factor, pixel.b, offset));
}

// Turns the hue, given in sixths of a turn, in HSV. The lightest and darkest values stay the same; the hue says where
// each channel lies between them.
__device__ inline void turn_hue(Pixel& pixel, float sextants) {
  const float lightest = fmaxf(pixel.r, fmaxf(pixel.g, pixel.b));
  const float darkest = fminf(pixel.r, fminf(pixel.g, pixel.b));
  const float range = lightest - darkest;
  // Below this range a turn is invisible, and the quotient might not be finite.
  const float inverse = range > 1e-8f ? __fdividef(1.0f, range) : 0.0f;
  float hue = fmaf(pixel.r - pixel.g, inverse, 4.0f);
  if (lightest == pixel.g) hue = fmaf(pixel.b - pixel.r, inverse, 2.0f);
  if (lightest == pixel.r) hue = (pixel.g - pixel.b) * inverse;
  hue += sextants;
  hue = fmaf(-6.0f, floorf(hue * (1.0f / 6.0f)), hue);
  pixel.r = fmaf(range, __saturatef(fabsf(hue - 3.0f) - 1.0f), darkest);
  pixel.g = fmaf(range, __saturatef(2.0f - fabsf(hue - 2.0f)), darkest);
  pixel.b = fmaf(range, __saturatef(2.0f - fabsf(hue - 4.0f)), darkest);
}

// Processes several pixels of a thread together, with one branch per operation and independent instructions inside it.
template <int kCount>
__device__ inline void apply_jitter(Pixel (&pixels)[kCount], const Jitter& jitter, unsigned operations) {
  for (; operations != 0; operations >>= 4) {
    const unsigned operation = operations & 15u;
    if (operation == kOpHue) {
#pragma unroll
      for (Pixel& pixel : pixels) turn_hue(pixel, jitter.sextants);
    } else if (operation == kOpSaturation) {
#pragma unroll
      for (Pixel& pixel : pixels) blend(pixel, jitter.factor[2], (1.0f - jitter.factor[2]) * grey_of(pixel));
    } else {
      const bool contrast = operation == kOpContrast;
      const float factor = contrast ? jitter.factor[1] : jitter.factor[0];
      const float offset = contrast ? jitter.contrast_offset : 0.0f;
#pragma unroll
      for (Pixel& pixel : pixels) blend(pixel, factor, offset);
    }
  }
}

template <int kCount>
__device__ inline void make_grey(Pixel (&pixels)[kCount]) {
#pragma unroll
  for (Pixel& pixel : pixels) pixel.r = pixel.g = pixel.b = grey_of(pixel);
}

}  // namespace fastcssl::views::gpu
