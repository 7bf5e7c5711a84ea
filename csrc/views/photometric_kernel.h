// Processes one image, in terms of a vector layer (simd_*.h) that must be included before this file.
//
// Without blur, a block of pixels is loaded, coloured, normalised and stored without leaving the registers. Contrast
// needs the image's mean grey first, which takes another pass over the colour operations that precede it.
// With blur, coloured rows are written as int16 to a ring of rows that stays in the cache. The vertical pass filters a
// few rows at a time, and the horizontal pass writes them to the output. A grey image is blurred in one plane only.
#pragma once

#include <cstdint>
#include <cstring>

#include "photometric_plan.h"

namespace fastcssl::views {
namespace {

// Compiled once for all callers: inlining into every variant would only lengthen the build.
#define FASTCSSL_APART static __attribute__((noinline))

struct Pixels {  // kLanes pixels
  F r, g, b;
};

constexpr int kParts = kBlock / kLanes;

struct Block {  // several vectors, because each operation is a long chain and several chains overlap
  Pixels part[kParts];
};

FASTCSSL_INLINE F grey(const Pixels& p) {
  return fma(p.r, set1(kGreyR), fma(p.g, set1(kGreyG), mul(p.b, set1(kGreyB))));
}

FASTCSSL_INLINE F clamp(F x) { return max(min(x, set1(255.0f)), set1(0.0f)); }

// Rotates the hue like torchvision does through HSV, but without its table: a channel is below the largest one by the
// range times a trapezoid function of the hue. The result cannot leave 0..255.
FASTCSSL_INLINE void rotate_hue(Pixels& p, float sixths) {
  const F top = max(max(p.r, p.g), p.b);
  const F range = sub(top, min(min(p.r, p.g), p.b));
  const F zero = set1(0.0f), one = set1(1.0f), two = set1(2.0f);
  F rise = if_equal(top, p.g, sub(p.b, p.r), sub(p.r, p.g));
  F base = if_equal(top, p.g, two, set1(4.0f));
  rise = if_equal(top, p.r, sub(p.g, p.b), rise);
  base = if_equal(top, p.r, zero, base);
  // A grey pixel has no hue. Any value works, because its range is zero.
  F hue = add(div(rise, max(range, set1(1e-12f))), add(base, set1(sixths)));
  hue = fnma(floor(mul(hue, set1(1.0f / 6.0f))), set1(6.0f), hue);
  const F from_r = sub(two, abs(sub(hue, set1(3.0f))));
  const F from_g = sub(abs(sub(hue, two)), one);
  const F from_b = sub(abs(sub(hue, set1(4.0f))), one);
  p.r = fnma(range, max(min(from_r, one), zero), top);
  p.g = fnma(range, max(min(from_g, one), zero), top);
  p.b = fnma(range, max(min(from_b, one), zero), top);
}

FASTCSSL_INLINE Pixels scaled(const Pixels& p, F factor, F shift) {
  return {clamp(fma(p.r, factor, shift)), clamp(fma(p.g, factor, shift)), clamp(fma(p.b, factor, shift))};
}

// Applies the colour operations before number `end`. The branches go the same way for every block.
FASTCSSL_INLINE void colour(Block& block, const Plan& plan, int end, float contrast_shift) {
  for (int i = 0; i < end; ++i) {
    switch (plan.ops[i]) {
      case kOpBrightness: {
        const F factor = set1(plan.brightness), shift = set1(0.0f);
        for (Pixels& p : block.part) p = scaled(p, factor, shift);
        break;
      }
      case kOpContrast: {
        const F factor = set1(plan.contrast), shift = set1(contrast_shift);
        for (Pixels& p : block.part) p = scaled(p, factor, shift);
        break;
      }
      case kOpSaturation: {
        const F factor = set1(plan.saturation), rest = set1(1.0f - plan.saturation);
        for (Pixels& p : block.part) p = scaled(p, factor, mul(grey(p), rest));
        break;
      }
      default:
        for (Pixels& p : block.part) rotate_hue(p, plan.hue);
    }
  }
}

// Returns the pixels x .. x + kBlock - 1 of a row in the order of the output, with black pixels past its end.
FASTCSSL_INLINE Block load_block(const std::uint8_t* row, int width, int x, bool flip) {
  alignas(64) std::uint8_t end_of_row[3 * kBlock];
  const int count = width - x;
  const std::uint8_t* from = row + 3 * (flip ? count - kBlock : x);
  if (count < kBlock) {
    std::memset(end_of_row, 0, sizeof end_of_row);
    std::memcpy(end_of_row + (flip ? 3 * (kBlock - count) : 0), row + (flip ? 0 : 3 * x), 3 * count);
    from = end_of_row;
  }
  __builtin_prefetch(from + 3 * width);  // the processor does not predict a row that is read backwards
  Block block;
  for (int half = 0; half < 2; ++half) {
    Bytes r, g, b;
    load_channels(from + (half == flip ? 0 : 3 * kBlock / 2), flip, r, g, b);
    Pixels* part = block.part + half * (kParts / 2);
    for (int i = 0; i < kParts / 2; ++i) part[i] = {to_float(r, i), to_float(g, i), to_float(b, i)};
  }
  return block;
}

// Returns (1 - contrast) * the mean grey of the image before contrast. Black pixels past the end of a row stay black.
FASTCSSL_APART float contrast_shift_of(const Plan& plan, const std::uint8_t* crop) {
  if (plan.contrast_at < 0) return 0.0f;
  double total = 0.0;
  for (int y = 0; y < plan.height; ++y) {
    const std::uint8_t* row = crop + static_cast<std::size_t>(y) * plan.width * 3;
    F row_total = set1(0.0f);
    for (int x = 0; x < plan.width; x += kBlock) {
      Block block = load_block(row, plan.width, x, false);
      colour(block, plan, plan.contrast_at, 0.0f);
      for (const Pixels& p : block.part) row_total = add(row_total, grey(p));
    }
    total += sum(row_total);
  }
  return static_cast<float>((1.0 - plan.contrast) * (total / plan.height / plan.width));
}

// Solarizes, normalises and stores the first `count` pixels.
FASTCSSL_INLINE void finish(const Plan& plan, Pixels p, int count, char* out) {
  if (plan.solarize) {
    const F threshold = set1(plan.threshold), white = set1(255.0f);
    p = {if_at_least(p.r, threshold, sub(white, p.r), p.r), if_at_least(p.g, threshold, sub(white, p.g), p.g),
         if_at_least(p.b, threshold, sub(white, p.b), p.b)};
  }
  F values[3];
  interleave(fma(p.r, set1(plan.scale[0]), set1(plan.bias[0])), fma(p.g, set1(plan.scale[1]), set1(plan.bias[1])),
             fma(p.b, set1(plan.scale[2]), set1(plan.bias[2])), values);
  alignas(64) char end_of_row[3 * kLanes * sizeof(float)];
  char* to = count < kLanes ? end_of_row : out;
  // This branch always goes the same way. Templates for each type would double the build time and save 1 %.
  if (plan.type == OutType::float32) {
    for (int i = 0; i < 3; ++i) store_float32(to + i * kLanes * 4, values[i]);
  } else if (plan.type == OutType::bfloat16) {
    for (int i = 0; i < 3; ++i) store_bfloat16(to + i * kLanes * 2, values[i]);
  } else {
    for (int i = 0; i < 3; ++i) store_float16(to + i * kLanes * 2, values[i]);
  }
  if (count < kLanes) std::memcpy(out, end_of_row, count * plan.pixel_bytes());
}

void without_blur(const Plan& plan, const std::uint8_t* crop, float contrast_shift, char* out) {
  for (int y = 0; y < plan.height; ++y) {
    const std::uint8_t* row = crop + static_cast<std::size_t>(y) * plan.width * 3;
    char* out_row = out + static_cast<std::size_t>(y) * plan.width * plan.pixel_bytes();
    for (int x = 0; x < plan.width; x += kBlock) {
      Block block = load_block(row, plan.width, x, plan.flip);
      colour(block, plan, plan.num_ops, contrast_shift);
      for (int i = 0; i < kParts && x + i * kLanes < plan.width; ++i) {
        const int at = x + i * kLanes;
        Pixels p = block.part[i];
        if (plan.gray) p.r = p.g = p.b = grey(p);
        finish(plan, p, plan.width - at, out_row + static_cast<std::size_t>(at) * plan.pixel_bytes());
      }
    }
  }
}

// Writes one coloured row to the ring, in one plane if the image is grey and in three otherwise.
FASTCSSL_APART void colour_row(const Plan& plan, const std::uint8_t* row, float contrast_shift, std::int16_t* to) {
  const std::size_t plane = ring_plane(plan.width);
  const F scale = set1(kFixedScale), shift = set1(-kFixedCentre * kFixedScale);
  for (int x = 0; x < plan.width; x += kBlock) {
    Block block = load_block(row, plan.width, x, plan.flip);
    colour(block, plan, plan.num_ops, contrast_shift);
    for (int i = 0; i < kParts; ++i) {
      const Pixels& p = block.part[i];
      std::int16_t* at = to + x + i * kLanes;
      if (plan.gray) {
        store_rounded(at, fma(grey(p), scale, shift));
      } else {
        store_rounded(at, fma(p.r, scale, shift));
        store_rounded(at + plane, fma(p.g, scale, shift));
        store_rounded(at + 2 * plane, fma(p.b, scale, shift));
      }
    }
  }
}

template <int pairs>
struct Taps {
  Weights weights[pairs];
  FASTCSSL_MEMBER explicit Taps(const Plan& plan) {
    for (int i = 0; i < pairs; ++i) weights[i] = make_weights(plan.weights[2 * i], plan.weights[2 * i + 1]);
  }
};

constexpr int kTogether = 32 / (2 * kLanes);  // vectors in 32 int16

// Adds the weighted pairs of mirrored rows, or of mirrored places in one row, for 32 int16. at(d) is the row or place
// at distance d from the centre. Several vectors share an address and a weight.
template <int pairs, class At>
FASTCSSL_INLINE void weigh(const Taps<pairs>& taps, const At& at, Acc (&acc)[kTogether]) {
  for (int i = 0; i < pairs; ++i) {
    const std::int16_t *a = at(-2 * i), *b = at(2 * i), *c = at(-2 * i - 1), *d = at(2 * i + 1);
    for (int v = 0; v < kTogether; ++v) {
      const int lane = v * 2 * kLanes;
      const I16 first = add16(load16(a + lane), load16(b + lane));
      const I16 second = add16(load16(c + lane), load16(d + lane));
      acc[v] = accumulate(acc[v], first, second, taps.weights[i]);
    }
  }
}

struct AtRow {
  const std::int16_t* const* rows;
  std::size_t x;
  FASTCSSL_MEMBER const std::int16_t* operator()(int distance) const { return rows[distance] + x; }
};
struct AtPlace {
  const std::int16_t* centre;
  FASTCSSL_MEMBER const std::int16_t* operator()(int distance) const { return centre + distance; }
};

// Returns the row or column that one outside the image mirrors, at any distance and for any image size.
FASTCSSL_INLINE int mirrored(int at, int size) {
  if (size == 1) return 0;
  const int period = 2 * (size - 1);
  at %= period;
  if (at < 0) at += period;
  return at < size ? at : period - at;
}

// Runs the vertical pass for `count` rows. window[0] is the centre of the first one. It works on narrow strips of
// columns, so that the window's part of a strip stays in the first-level cache.
template <int pairs>
FASTCSSL_APART void blur_down(const Plan& plan, const Taps<pairs>& taps, const std::int16_t* const* window, int count,
                              int planes, std::int16_t* wide) {
  constexpr std::size_t kStrip = 64;
  const std::size_t from_plane = ring_plane(plan.width), to_plane = wide_plane(plan.width);
  for (int c = 0; c < planes; ++c) {
    for (std::size_t strip = 0; strip < from_plane; strip += kStrip) {
      const std::size_t end = strip + kStrip < from_plane ? strip + kStrip : from_plane;
      for (int i = 0; i < count; ++i) {
        std::int16_t* to = wide + (static_cast<std::size_t>(i) * planes + c) * to_plane + kPad;
        for (std::size_t x = strip; x < end; x += 32) {
          Acc acc[kTogether];
          for (Acc& a : acc) a = start(1 << (kWeightBits - 1));
          weigh(taps, AtRow{window + i, c * from_plane + x}, acc);
          for (int v = 0; v < kTogether; ++v) store16(to + x + v * 2 * kLanes, narrow(acc[v]));
        }
      }
    }
  }
}

// Mirrors one row at both ends, runs the horizontal pass and writes the output.
template <int pairs>
FASTCSSL_INLINE void blur_across(const Plan& plan, const Taps<pairs>& taps, std::int16_t* wide, int planes, char* out) {
  const int width = plan.width, radius = plan.radius();
  const std::size_t plane = wide_plane(width);
  for (int c = 0; c < planes; ++c) {
    std::int16_t* row = wide + c * plane + kPad;
    for (int i = 1; i <= radius; ++i) {
      row[-i] = row[mirrored(-i, width)];
      row[width - 1 + i] = row[mirrored(width - 1 + i, width)];
    }
  }
  const F scale = set1(1.0f / (kFixedScale * (1 << kWeightBits))), centre = set1(kFixedCentre);
  for (int x = 0; x < width; x += 32) {
    F part[3][2 * kTogether];
    for (int c = 0; c < planes; ++c) {
      Acc acc[kTogether];
      for (Acc& a : acc) a = start(0);
      weigh(taps, AtPlace{wide + c * plane + kPad + x}, acc);
      for (int v = 0; v < kTogether; ++v) widen(acc[v], part[c][2 * v], part[c][2 * v + 1]);
      for (F& values : part[c]) values = fma(values, scale, centre);
    }
    for (int i = 0; i < 2 * kTogether && x + i * kLanes < width; ++i) {
      const int at = x + i * kLanes;
      const Pixels p =
          planes == 1 ? Pixels{part[0][i], part[0][i], part[0][i]} : Pixels{part[0][i], part[1][i], part[2][i]};
      finish(plan, p, width - at, out + static_cast<std::size_t>(at) * plan.pixel_bytes());
    }
  }
}

template <int pairs>
void with_blur(const Plan& plan, const std::uint8_t* crop, float contrast_shift, char* out, std::int16_t* ring) {
  const Taps<pairs> taps(plan);
  const int planes = plan.gray ? 1 : 3, radius = plan.radius();
  const std::size_t stride = ring_stride(plan.width), plane = wide_plane(plan.width);
  std::int16_t* wide = ring + kRingRows * stride;
  const std::int16_t* window[kGroupRows + 2 * kMaxRadius];
  int next = 0;  // the first row that is not in the ring yet
  for (int y = 0; y < plan.height; y += kGroupRows) {
    const int count = plan.height - y < kGroupRows ? plan.height - y : kGroupRows;
    for (; next < plan.height && next < y + count + radius; ++next) {
      const std::uint8_t* row = crop + static_cast<std::size_t>(next) * plan.width * 3;
      colour_row(plan, row, contrast_shift, ring + next % kRingRows * stride);
    }
    for (int i = 0; i < count + 2 * radius; ++i) {
      window[i] = ring + mirrored(y - radius + i, plan.height) % kRingRows * stride;
    }
    blur_down<pairs>(plan, taps, window + radius, count, planes, wide);
    for (int i = 0; i < count; ++i) {
      char* out_row = out + static_cast<std::size_t>(y + i) * plan.width * plan.pixel_bytes();
      // Passes constants, so that each case is compiled for its number of planes.
      if (planes == 1) {
        blur_across<pairs>(plan, taps, wide + i * plane, 1, out_row);
      } else {
        blur_across<pairs>(plan, taps, wide + i * 3 * plane, 3, out_row);
      }
    }
  }
}

void run(const Plan& plan, const std::uint8_t* crop, void* out, void* scratch) {
  auto* to = static_cast<char*>(out);
  auto* ring = static_cast<std::int16_t*>(scratch);
  const float shift = contrast_shift_of(plan, crop);
  switch (plan.num_pairs) {
    case 0:
      return without_blur(plan, crop, shift, to);
    case 1:
      return with_blur<1>(plan, crop, shift, to, ring);
    case 2:
      return with_blur<2>(plan, crop, shift, to, ring);
    case 3:
      return with_blur<3>(plan, crop, shift, to, ring);
    case 4:
      return with_blur<4>(plan, crop, shift, to, ring);
    case 5:
      return with_blur<5>(plan, crop, shift, to, ring);
    default:
      return with_blur<6>(plan, crop, shift, to, ring);
  }
}

}  // namespace
}  // namespace fastcssl::views
