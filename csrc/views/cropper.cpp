#include "cropper.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <vector>

#include "mapped_file.h"

namespace fastcssl::views {

bool Cropper::load_jpeg(codec::Bytes jpeg, int width, int height, const codec::Region& region, std::string& fault) {
  codec::Diagnosis diagnosis;
  if (codec::decode_region(jpeg, width, height, region, image_, origin_x_, origin_y_, diagnosis)) return true;
  fault = diagnosis.damage;
  return false;
}

std::uint8_t* Cropper::room_for_pixels(int width, int height) {
  image_.reset(width, height);
  origin_x_ = origin_y_ = 0;
  return image_.rgb.data();
}

void Cropper::crop(const float* box_4, const codec::Filter& filter, int size_px, std::uint8_t* out) {
  const codec::Box inside{double(box_4[0]) - origin_x_, double(box_4[1]) - origin_y_, double(box_4[2]) - origin_x_,
                          double(box_4[3]) - origin_y_};
  resizer_.run(image_, inside, filter, size_px, size_px, out);
}

void include(codec::Region& region, const float* box_4, const codec::Filter& filter, int size_px, int width,
             int height) {
  const double scale = std::max(double(box_4[2]) - box_4[0], double(box_4[3]) - box_4[1]) / size_px;
  const int margin = filter.stop_at_box ? 0 : static_cast<int>(std::ceil(2 * std::max(scale, 1.0))) + 1;
  region.left = std::min(region.left, std::max(0, static_cast<int>(std::floor(box_4[0])) - margin));
  region.top = std::min(region.top, std::max(0, static_cast<int>(std::floor(box_4[1])) - margin));
  region.right = std::max(region.right, std::min(width, static_cast<int>(std::ceil(box_4[2])) + margin));
  region.bottom = std::max(region.bottom, std::min(height, static_cast<int>(std::ceil(box_4[3])) + margin));
}

}  // namespace fastcssl::views

// Decodes a JPEG and writes its crops, in the calling thread. The C interface is for callers such as numba's code.
// box_V4: floats. target_V3: for each view, its size in pixels, the address to write to, and its filter
// (1 bicubic | 2 antialias | 4 stop at the box). Returns 0 if done, -1 if the JPEG is damaged, -2 if memory ran out or
// another exception was thrown, and -3 if the JPEG lies in a mapped file that no longer has it.
extern "C" __attribute__((visibility("default"))) std::int64_t fastcssl_crop_jpeg(
    std::int64_t jpeg, std::int64_t num_bytes, std::int64_t width, std::int64_t height, std::int64_t num_views,
    std::int64_t box_V4, std::int64_t target_V3) {
  using namespace fastcssl;
  thread_local views::Cropper cropper;
  thread_local std::vector<std::uint8_t> copy;
  const float* box = reinterpret_cast<const float*>(box_V4);
  const std::int64_t* target = reinterpret_cast<const std::int64_t*>(target_V3);
  const auto filter_of = [&](std::int64_t view) {
    const std::int64_t bits = target[view * 3 + 2];
    const auto kind = bits & 1 ? codec::Interpolation::bicubic : codec::Interpolation::bilinear;
    return codec::Filter{kind, (bits & 2) != 0, (bits & 4) != 0};
  };
  try {
    const int w = static_cast<int>(width), h = static_cast<int>(height);
    codec::Region region{w, h, 0, 0};
    for (std::int64_t v = 0; v < num_views; ++v)
      views::include(region, box + v * 4, filter_of(v), static_cast<int>(target[v * 3]), w, h);
    std::string fault;
    const auto size = static_cast<std::size_t>(num_bytes);
    if (copy.size() < size) copy.resize(size);
    if (!views::copy_mapped(copy.data(), reinterpret_cast<const void*>(jpeg), size)) return -3;
    const codec::Bytes bytes{copy.data(), size};
    if (!cropper.load_jpeg(bytes, w, h, region, fault)) return -1;
    for (std::int64_t v = 0; v < num_views; ++v)
      cropper.crop(box + v * 4, filter_of(v), static_cast<int>(target[v * 3]),
                   reinterpret_cast<std::uint8_t*>(target[v * 3 + 1]));
    return 0;
  } catch (const std::exception&) {
    return -2;
  }
}
