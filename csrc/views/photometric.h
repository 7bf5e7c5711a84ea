// The photometric operations of a view: they turn a uint8 crop into a normalised channels-last image.
//
// These apply to each pixel in this order, in float on the scale 0..255. Each step clamps to 0..255 without rounding:
//   brightness, contrast, saturation, hue   in the sample's own order (see kOrders)
//   grayscale
//   Gaussian blur, radius ceil(5.5 sigma) <= 11, mirrored at the border without repeating the edge
//   solarize: x >= threshold becomes 255 - x
//   horizontal flip (commutes with all of the above)
//   (x / 255 - mean) / std
// Grey is 0.2989 R + 0.587 G + 0.114 B. An operation with its neutral value is skipped and changes no bit.
// The CPU path, the CUDA path and the emulator share this header, so it includes neither torch nor CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../device/failure.h"

namespace fastcssl::views {

// The parameters of one sample, as float32 columns of a [N, kNumColumns] tensor. Neutral values leave the image
// unchanged.
enum Column : int {
  kFlip = 0,        // 0 or 1
  kBrightness = 1,  // factor, neutral 1
  kContrast = 2,    // factor towards the image's mean grey, neutral 1
  kSaturation = 3,  // factor towards the pixel's grey, neutral 1
  kHue = 4,         // shift in turns, -0.5..0.5, neutral 0
  kOrder = 5,       // 0..23: which permutation of (brightness, contrast, saturation, hue)
  kGray = 6,        // 0 or 1
  kSigma = 7,       // sigma of the blur in pixels; 0: no blur
  kSolarize = 8,    // threshold in 0..255; 256: no solarization
  kNumColumns = 9,
};

constexpr int kMaxRadius = 11;

// kOrders[i] lists the four operations (0 brightness, 1 contrast, 2 saturation, 3 hue) in the i-th lexicographic order.
// clang-format off
constexpr std::uint8_t kOrders[24][4] = {
    {0, 1, 2, 3}, {0, 1, 3, 2}, {0, 2, 1, 3}, {0, 2, 3, 1}, {0, 3, 1, 2}, {0, 3, 2, 1},
    {1, 0, 2, 3}, {1, 0, 3, 2}, {1, 2, 0, 3}, {1, 2, 3, 0}, {1, 3, 0, 2}, {1, 3, 2, 0},
    {2, 0, 1, 3}, {2, 0, 3, 1}, {2, 1, 0, 3}, {2, 1, 3, 0}, {2, 3, 0, 1}, {2, 3, 1, 0},
    {3, 0, 1, 2}, {3, 0, 2, 1}, {3, 1, 0, 2}, {3, 1, 2, 0}, {3, 2, 0, 1}, {3, 2, 1, 0},
};
// clang-format on

enum class OutType : int { float32 = 0, bfloat16 = 1, float16 = 2 };

struct Normalisation {
  float mean[3];  // on the scale 0..1
  float std[3];
};

// CPU. Processes one image in the calling thread: crop is [height, width, 3] uint8, out is [height, width, 3] of
// `type`. `scratch` is this thread's workspace of at least photometric_scratch_bytes(height, width), 64-byte aligned.
std::size_t photometric_scratch_bytes(int height, int width);
void photometric_image(const std::uint8_t* crop, int height, int width, const float* columns,
                       const Normalisation& normalisation, OutType type, void* out, void* scratch);
// Returns the instruction set that photometric_image uses: "avx512", "avx2" or "portable". For tests, a name passed to
// photometric_force_isa overrides the choice, and nullptr undoes that.
const char* photometric_isa();
bool photometric_force_isa(const char* name);

// CUDA. Processes the whole batch on `stream` (a cudaStream_t). Every pointer is a device pointer. `workspace` has at
// least photometric_cuda_workspace_bytes bytes. Never synchronises.
std::size_t photometric_cuda_workspace_bytes(int num_images, int height, int width);
device::Failure photometric_cuda(const std::uint8_t* crops, int num_images, int height, int width, const float* columns,
                                 const Normalisation& normalisation, OutType type, void* out, void* workspace,
                                 void* stream);

}  // namespace fastcssl::views
