// Decode once, crop many: one thread's buffers and the two steps that turn a stored sample into crops.
#pragma once

#include <cstdint>
#include <string>

#include "../codec/jpeg.h"
#include "../codec/resize.h"

namespace fastcssl::views {

class Cropper {
 public:
  // Decodes the part of a JPEG that the boxes need, see include() below.
  bool load_jpeg(codec::Bytes jpeg, int width, int height, const codec::Region& region, std::string& fault);
  // Takes an image that is already pixels.
  void load_pixels(const std::uint8_t* rgb, int width, int height);
  // A box of the loaded image, in pixels of the whole, as size_px x size_px x 3 bytes.
  void crop(const float* box_4, const codec::Filter& filter, int size_px, std::uint8_t* out);

 private:
  codec::Image image_;
  int origin_x_ = 0, origin_y_ = 0;
  codec::Resizer resizer_;
};

// Grows `region` (begin with {width, height, 0, 0}) so that it holds what this view reads of a width x height image.
void include(codec::Region& region, const float* box_4, const codec::Filter& filter, int size_px, int width,
             int height);

}  // namespace fastcssl::views
