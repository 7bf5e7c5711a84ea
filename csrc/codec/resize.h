// Anti-aliased resampling of 8-bit RGB.
//
// Two passes of fixed-point arithmetic (14-bit weights, 32-bit sums): the AVX2 path and the portable one give the same
// bits, so prepared data does not depend on the machine that prepared it.
#pragma once

#include "image.h"

namespace fastcssl::codec {

// A rectangle of the source in pixels; edges may lie between pixels.
struct Box {
  double left, top, right, bottom;
};

enum class Isa { portable, avx2 };

// The best path this processor has.
Isa best_isa();

// Bicubic (a = -0.5), widened when shrinking, as Pillow's BICUBIC and torch's antialias=True.
void resize(const Image& source, const Box& box, int width, int height, Image& out, Isa isa = best_isa());

}  // namespace fastcssl::codec
