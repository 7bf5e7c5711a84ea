// The plan of one image: scalar code computes it from the sample's columns, and all instruction sets share it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "photometric.h"

namespace fastcssl::views {

enum Op : std::uint8_t { kOpBrightness = 0, kOpContrast = 1, kOpSaturation = 2, kOpHue = 3 };

// torchvision's weights of grey. They add up to 0.9999.
constexpr float kGreyR = 0.2989f, kGreyG = 0.587f, kGreyB = 0.114f;

// The blur works on int16: round((x - 127.5) * 128). Values are centred, so that the sum of two mirrored pixels fits.
constexpr float kFixedCentre = 127.5f, kFixedScale = 128.0f;
constexpr int kWeightBits = 16;

// The number of rows in the ring, a power of two, and the number of output rows per window position.
constexpr int kRingRows = 32, kGroupRows = 8;
static_assert(kGroupRows + 2 * kMaxRadius <= kRingRows, "the ring must hold the window of a whole group");

constexpr int kBlock = 32;  // pixels coloured at a time
constexpr int kPad = 32;    // int16 on each side of a row, for the mirrored border and for loads past its end

struct Plan {
  int height = 0, width = 0;
  bool flip = false, gray = false, solarize = false;

  // The colour operations that are not neutral, in order. contrast_at is the number of operations before contrast, or
  // -1 without contrast.
  int num_ops = 0, contrast_at = -1;
  std::uint8_t ops[4] = {};
  float brightness = 1, contrast = 1, saturation = 1;
  float hue = 0;  // in sixths of a turn

  // Pairs of weights in units of 1/65536, for the sums of mirrored pixels at distances 2i and 2i + 1. The centre is its
  // own mirror image, so its weight is halved. num_pairs is 0 if the blur is too narrow to be visible.
  int num_pairs = 0;
  std::int16_t weights[kMaxRadius + 1] = {};

  float threshold = 256;
  float scale[3] = {}, bias[3] = {};  // out = x * scale + bias
  OutType type = OutType::float32;

  std::size_t pixel_bytes() const { return type == OutType::float32 ? 12 : 6; }
  int radius() const { return 2 * num_pairs - 1; }
};

inline std::size_t round_up(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }

// The int16 per plane of a ring row, and of a row that waits for the horizontal pass.
inline std::size_t ring_plane(int width) { return round_up(width, 32); }
inline std::size_t wide_plane(int width) { return ring_plane(width) + 2 * kPad; }
// The int16 from one ring row to the next: an odd number of cache lines, so that rows do not use the same cache sets.
inline std::size_t ring_stride(int width) { return round_up(3 * ring_plane(width), 64) + 32; }

using Runner = void (*)(const Plan& plan, const std::uint8_t* crop, void* out, void* scratch);
void run_portable(const Plan& plan, const std::uint8_t* crop, void* out, void* scratch);
void run_avx2(const Plan& plan, const std::uint8_t* crop, void* out, void* scratch);
void run_avx512(const Plan& plan, const std::uint8_t* crop, void* out, void* scratch);

}  // namespace fastcssl::views
