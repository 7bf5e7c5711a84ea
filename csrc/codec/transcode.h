// Turns an image file into the bytes that are stored: checked, upright, resized, as JPEG.
#pragma once

#include <string>

#include "image.h"
#include "jpeg.h"

namespace fastcssl::codec {

enum class Fit {
  none,        // unchanged
  short_side,  // shrink until the shorter side is `size`
  max_side,    // shrink until the longer side is `size`
  square,      // centre square, then exactly `size` x `size`
};

struct Settings {
  Fit fit = Fit::none;
  int size = 0;
  int quality = 90;
  bool check_in_full = true;  // also decode images that are passed through unchanged, not just their headers
  bool want_jpeg = true;
  bool want_pixels = false;
};

enum class Status {
  ok,
  foreign,  // not a JPEG; `file` holds the bytes for another decoder
  damaged,  // `fault` says why
};

struct Stored {
  Status status = Status::ok;
  bool passed_through = false;
  int width = 0;
  int height = 0;
  std::string jpeg;
  Image image;  // filled if pixels are wanted
  std::string file;
  std::string fault;
  int num_warnings = 0;
  std::string first_warning;
};

Stored store_file(std::string file, const Settings& settings);
Stored store_pixels(Image image, const Settings& settings);

// Reads the file first. A file that cannot be read, or that is not a regular file, is `damaged`.
Stored store_path(const std::string& path, const Settings& settings);

}  // namespace fastcssl::codec
