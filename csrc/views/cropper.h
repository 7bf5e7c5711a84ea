// Decodes a stored sample once and makes several crops of it, with the buffers of one thread.
#pragma once

#include <cstdint>
#include <string>

#include "../codec/jpeg.h"
#include "../codec/resize.h"

namespace fastcssl::views {

class Cropper {
 public:
  // Decodes the region of a JPEG that the boxes need. See include() below.
  bool load_jpeg(codec::Bytes jpeg, int width, int height, const codec::Region& region, std::string& fault);
  // Returns where to put an image that is already decoded: height x width x 3 bytes.
  std::uint8_t* room_for_pixels(int width, int height);
  // Writes a box of the loaded image, given in pixels of the whole image, as size_px x size_px x 3 bytes.
  void crop(const float* box_4, const codec::Filter& filter, int size_px, std::uint8_t* out);

 private:
  codec::Image image_;
  int origin_x_ = 0, origin_y_ = 0;
  codec::Resizer resizer_;
};

// Extends `region` (initially {width, height, 0, 0}) by the pixels that this view reads of a width x height image.
void include(codec::Region& region, const float* box_4, const codec::Filter& filter, int size_px, int width,
             int height);

}  // namespace fastcssl::views
