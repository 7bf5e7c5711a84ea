// Resamples 8-bit RGB images.
//
// Two passes use fixed-point arithmetic (14-bit weights, 32-bit sums). The AVX2 path and the portable path give the
// same bits, so prepared data and crops do not depend on the machine.
#pragma once

#include <cstdint>
#include <vector>

#include "image.h"

namespace fastcssl::codec {

// A rectangle of the source in pixels. Its edges may lie between pixels.
struct Box {
  double left, top, right, bottom;
};

enum class Isa { portable, avx2 };

// Returns the fastest path that this processor supports.
Isa best_isa();

enum class Interpolation { bilinear, bicubic };

struct Filter {
  Interpolation interpolation = Interpolation::bicubic;
  bool antialias = true;     // widen the kernel when shrinking, like Pillow and torch's antialias=True
  bool stop_at_box = false;  // read nothing outside the box: cut it out, then resize, as a random crop does
};

// Output i is the sum over t of weight[i * stride + t] * source[first[i] + t]. Taps are padded with zero weights to a
// multiple of four, and `first` is reduced so that the padded taps stay inside the source if it is long enough.
struct Taps {
  int stride = 0;
  std::vector<int> first;
  std::vector<int> low, count;  // the taps that have a weight, without the padding
  std::vector<std::int16_t> weight;
  std::vector<std::int16_t> wide;  // every pair of weights, repeated for each channel as the vector code needs it

  void widen();
  void make(int source_size, double begin, double end, int out_size, const Filter& filter);

 private:
  std::vector<double> exact_;
};

// Keeps its buffers between calls. Each thread needs its own.
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
