// Resampling of 8-bit RGB.
//
// Two passes of fixed-point arithmetic (14-bit weights, 32-bit sums): the AVX2 path and the portable one give the same
// bits, so neither prepared data nor a crop depends on the machine that made it.
#pragma once

#include <cstdint>
#include <vector>

#include "image.h"

namespace fastcssl::codec {

// A rectangle of the source in pixels; edges may lie between pixels.
struct Box {
  double left, top, right, bottom;
};

enum class Isa { portable, avx2 };

// The best path this processor has.
Isa best_isa();

enum class Interpolation { bilinear, bicubic };

struct Filter {
  Interpolation interpolation = Interpolation::bicubic;
  bool antialias = true;     // widen the kernel when shrinking, as Pillow and torch's antialias=True
  bool stop_at_box = false;  // read nothing outside the box: cut out, then resize, as a random crop does
};

// For output i: sum over t of weight[i * stride + t] * source[first[i] + t]. Taps are padded with zero weights to a
// multiple of four, and `first` is pulled back so that the padded taps stay inside the source where it is long enough.
struct Taps {
  int stride = 0;
  std::vector<int> first;
  std::vector<int> low, count;  // without the padding: the taps that have a weight
  std::vector<std::int16_t> weight;
  std::vector<std::int16_t> wide;  // every pair of weights once for each channel, as vector code multiplies them

  void widen();
  void make(int source_size, double begin, double end, int out_size, const Filter& filter);

 private:
  std::vector<double> exact_;
};

// Keeps its buffers between calls: one for each thread.
class Resizer {
 public:
  // `out` has room for height x width x 3 bytes.
  void run(const Image& source, const Box& box, const Filter& filter, int width, int height, std::uint8_t* out,
           Isa isa = best_isa());

 private:
  Taps down_, across_;
  Image narrowed_;
};

}  // namespace fastcssl::codec
