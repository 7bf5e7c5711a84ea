// An 8-bit RGB image in memory, with packed rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastcssl::codec {

struct Image {
  int width = 0;
  int height = 0;
  std::vector<std::uint8_t> rgb;  // height x width x 3, and a few extra bytes that a vector load may read

  static constexpr std::size_t kSlack = 16;

  void reset(int new_width, int new_height) {
    width = new_width;
    height = new_height;
    rgb.resize(num_bytes() + kSlack);
  }
  std::size_t num_bytes() const { return static_cast<std::size_t>(width) * height * 3; }
  std::uint8_t* row(int y) { return rgb.data() + static_cast<std::size_t>(y) * width * 3; }
  const std::uint8_t* row(int y) const { return rgb.data() + static_cast<std::size_t>(y) * width * 3; }
};

}  // namespace fastcssl::codec
