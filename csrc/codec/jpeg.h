// JPEG in and out through the libjpeg API.
//
// libjpeg's default error handler ends the process; ours returns, and tells damage (a fatal error, a premature end, bad
// entropy data) from the warnings that leave every pixel intact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "image.h"

namespace fastcssl::codec {

struct Bytes {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

// What went wrong while reading one JPEG. `damage` empty: every pixel was decoded from intact data.
struct Diagnosis {
  std::string damage;
  int num_warnings = 0;
  std::string first_warning;
};

struct JpegHeader {
  int width = 0;
  int height = 0;
  int orientation = 1;      // EXIF tag 0x0112, 1 = upright
  bool convertible = true;  // false for CMYK and YCCK, which other decoders refuse or misread
};

bool is_jpeg(Bytes file);

// Reads up to the first scan. False: see `diagnosis.damage`.
bool read_header(Bytes jpeg, JpegHeader& header, Diagnosis& diagnosis);

// Decodes to RGB as stored (EXIF orientation is not applied), at 1/reduction of the size (1, 2, 4 or 8). Every
// entropy-coded bit is read at every reduction, so reduction 8 is the cheap way to check a file in full.
bool decode(Bytes jpeg, int reduction, Image& image, Diagnosis& diagnosis);

// Decodes only the rectangle [left, right) x [top, bottom) and a few columns around it. `origin_x` and `origin_y` say where
// `image` begins in the whole picture. Inside the rectangle the pixels are those of a full decode. What lies below it is
// not read, so damage there goes unnoticed. A picture of another size than `width` x `height` is refused.
struct Region {
  int left, top, right, bottom;
};
bool decode_region(Bytes jpeg, int width, int height, const Region& region, Image& image, int& origin_x, int& origin_y,
                   Diagnosis& diagnosis);

// Baseline, 4:2:0, the same bytes on every machine with the same library. False: see `error`.
bool encode(const Image& image, int quality, std::string& jpeg, std::string& error);

}  // namespace fastcssl::codec
