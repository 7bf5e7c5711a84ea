// Decodes and encodes JPEGs through the libjpeg API.
//
// libjpeg's default error handler ends the process. Ours returns, and distinguishes damage (a fatal error, a premature
// end, bad entropy data) from warnings that leave every pixel intact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "image.h"

namespace fastcssl::codec {

// What a file may cost. No photo reaches these limits (docs/prep.md lists them); a file beyond them is damaged.
constexpr std::uint64_t kMaxPixels = 178'956'970;        // the limit of Pillow
constexpr std::uint64_t kMaxScans = 500;                 // encoders write about 10
constexpr std::uint64_t kMaxScannedPixels = 1ull << 32;  // pixels x scans: every scan visits every block
constexpr std::uint64_t kMaxPixelsPerByte = 4096;        // a Huffman code has a bit, so blank images stay below 1024
constexpr std::uint64_t kMaxFileBytes = 1ull << 30;
constexpr std::uint64_t kMaxLibraryBytes = 1'500'000'000;  // libjpeg's own memory: the coefficients of several scans

struct Bytes {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

// What went wrong while reading one JPEG. If `damage` is empty, every pixel was decoded from intact data.
struct Diagnosis {
  std::string damage;
  int num_warnings = 0;
  std::string first_warning;
};

struct JpegHeader {
  int width = 0;
  int height = 0;
  int orientation = 1;      // EXIF tag 0x0112, 1 = upright
  bool convertible = true;  // false for CMYK and YCCK, which other decoders reject or misread
};

bool is_jpeg(Bytes file);

// Reads up to the first scan. If it returns false, `diagnosis.damage` says why.
bool read_header(Bytes jpeg, JpegHeader& header, Diagnosis& diagnosis);

// Decodes to RGB as stored (without applying the EXIF orientation), at 1/reduction of the size (1, 2, 4 or 8). Every
// reduction reads all entropy-coded bits, so reduction 8 is a cheap way to check a complete file.
bool decode(Bytes jpeg, int reduction, Image& image, Diagnosis& diagnosis);

// Decodes only the rectangle [left, right) x [top, bottom) and a few columns around it. `origin_x` and `origin_y` are
// the position of `image` in the whole picture. Inside the rectangle, the pixels equal those of a full decode. Rows
// below the rectangle are not read, so damage there is not noticed. Fails if the picture's size is not `width` x
// `height`.
struct Region {
  int left, top, right, bottom;
};
bool decode_region(Bytes jpeg, int width, int height, const Region& region, Image& image, int& origin_x, int& origin_y,
                   Diagnosis& diagnosis);

// Encodes as baseline 4:2:0, with the same bytes on every machine that has the same library. If it returns false,
// `error` says why.
bool encode(const Image& image, int quality, std::string& jpeg, std::string& error);

}  // namespace fastcssl::codec
