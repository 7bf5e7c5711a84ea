#include "jpeg.h"

#include <algorithm>
#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <jpeglib.h>
// jerror.h must come after jpeglib.h.
#include <jerror.h>

namespace fastcssl::codec {
namespace {

struct ErrorManager {
  jpeg_error_mgr base;
  std::jmp_buf jump;
  char message[JMSG_LENGTH_MAX] = {0};
  Diagnosis* diagnosis = nullptr;
};

ErrorManager& manager_of(j_common_ptr cinfo) { return *reinterpret_cast<ErrorManager*>(cinfo->err); }

void on_error(j_common_ptr cinfo) {
  ErrorManager& errors = manager_of(cinfo);
  errors.base.format_message(cinfo, errors.message);
  std::longjmp(errors.jump, 1);
}

bool is_damage(int code) {
  switch (code) {
    case JWRN_HIT_MARKER:     // a marker inside the entropy-coded data
    case JWRN_JPEG_EOF:       // the file ends before the end-of-image marker
    case JWRN_HUFF_BAD_CODE:  // an invalid code
    case JWRN_ARITH_BAD_CODE:
    case JWRN_MUST_RESYNC:  // a restart marker is missing or out of order
      return true;
    default:
      return false;
  }
}

void on_message(j_common_ptr cinfo, int level) {
  if (level >= 0) return;  // traces
  ErrorManager& errors = manager_of(cinfo);
  errors.base.num_warnings++;
  if (errors.diagnosis == nullptr) return;
  Diagnosis& diagnosis = *errors.diagnosis;
  diagnosis.num_warnings++;
  char text[JMSG_LENGTH_MAX];
  errors.base.format_message(cinfo, text);
  if (diagnosis.first_warning.empty()) diagnosis.first_warning = text;
  if (!is_damage(errors.base.msg_code)) return;
  // Stop here: libjpeg would fill the rest of the picture with grey, however large it is.
  std::memcpy(errors.message, text, sizeof text);
  std::longjmp(errors.jump, 1);
}

void on_output(j_common_ptr) {}

void install(ErrorManager& errors, Diagnosis* diagnosis) {
  jpeg_std_error(&errors.base);
  errors.base.error_exit = on_error;
  errors.base.emit_message = on_message;
  errors.base.output_message = on_output;
  errors.diagnosis = diagnosis;
}

// Owns the decompressor, so that it is freed however the function returns.
struct Decompressor {
  jpeg_decompress_struct cinfo;
  ErrorManager errors;

  explicit Decompressor(Diagnosis& diagnosis) {
    std::memset(&cinfo, 0, sizeof cinfo);
    install(errors, &diagnosis);
    cinfo.err = &errors.base;
  }
  ~Decompressor() { jpeg_destroy_decompress(&cinfo); }
  Decompressor(const Decompressor&) = delete;
  Decompressor& operator=(const Decompressor&) = delete;
};

struct Compressor {
  jpeg_compress_struct cinfo;
  ErrorManager errors;
  unsigned char* buffer = nullptr;
  unsigned long size = 0;

  Compressor() {
    std::memset(&cinfo, 0, sizeof cinfo);
    install(errors, nullptr);
    cinfo.err = &errors.base;
  }
  ~Compressor() {
    jpeg_destroy_compress(&cinfo);
    std::free(buffer);
  }
  Compressor(const Compressor&) = delete;
  Compressor& operator=(const Compressor&) = delete;
};

unsigned read_u16(const JOCTET* p, bool little) { return little ? p[0] | p[1] << 8 : p[0] << 8 | p[1]; }
std::uint32_t read_u32(const JOCTET* p, bool little) {
  return little ? read_u16(p, true) | std::uint32_t{read_u16(p + 2, true)} << 16
                : std::uint32_t{read_u16(p, false)} << 16 | read_u16(p + 2, false);
}

// Returns the orientation in the first image directory of an APP1 Exif segment, or 1 if it is missing or invalid.
int exif_orientation(const jpeg_marker_struct* marker) {
  for (; marker != nullptr; marker = marker->next) {
    const JOCTET* segment = marker->data;
    const std::size_t length = marker->data_length;
    if (marker->marker != JPEG_APP0 + 1 || length < 14 || std::memcmp(segment, "Exif\0\0", 6) != 0) continue;
    const JOCTET* tiff = segment + 6;
    const std::size_t tiff_length = length - 6;
    const bool little = tiff[0] == 'I';
    const std::size_t directory = read_u32(tiff + 4, little);
    if (directory + 2 > tiff_length) return 1;
    const unsigned num_entries = read_u16(tiff + directory, little);
    for (unsigned i = 0; i < num_entries; ++i) {
      const std::size_t entry = directory + 2 + 12 * std::size_t{i};
      if (entry + 12 > tiff_length) return 1;
      if (read_u16(tiff + entry, little) != 0x0112) continue;
      const unsigned value = read_u16(tiff + entry + 8, little);
      return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
    }
  }
  return 1;
}

bool is_cmyk(const jpeg_decompress_struct& cinfo) {
  return cinfo.jpeg_color_space == JCS_CMYK || cinfo.jpeg_color_space == JCS_YCCK;
}

// Counts the scans of a file by walking from marker to marker, without decoding. Where the file breaks the rules of the
// format, it skips no more than libjpeg does, so it never counts fewer scans than libjpeg would decode.
std::uint64_t count_scans(Bytes jpeg) {
  constexpr std::uint8_t kRst0 = 0xD0, kSoi = 0xD8, kEoi = 0xD9, kSos = 0xDA, kSof0 = 0xC0;
  const std::uint8_t* at = jpeg.data;
  const std::uint8_t* const end = jpeg.data + jpeg.size;
  std::uint64_t num_scans = 0;
  while (at < end && (at = static_cast<const std::uint8_t*>(std::memchr(at, 0xFF, end - at))) != nullptr) {
    if (++at == end) break;
    const std::uint8_t marker = *at;
    if (marker == kEoi) break;
    // A stuffed zero, a fill byte, a restart, or a marker that libjpeg does not know: none has a length.
    if (marker == 0xFF || marker < kSof0 || (marker >= kRst0 && marker <= kSoi)) {
      at += marker != 0xFF;
      continue;
    }
    num_scans += marker == kSos;
    if (end - at < 3) break;
    const std::ptrdiff_t length = at[1] << 8 | at[2];
    if (length < 2 || end - at <= length) break;
    at += 1 + length;
  }
  return num_scans;
}

// Jumps to the caller's setjmp.
template <class... Values>
[[noreturn]] void refuse(Decompressor& reader, const char* format, Values... values) {
  std::snprintf(reader.errors.message, sizeof reader.errors.message, format, values...);
  std::longjmp(reader.errors.jump, 1);
}

// Refuses what would take far more memory or time than its size suggests.
void check_cost(Decompressor& reader, Bytes jpeg) {
  using Number = unsigned long long;
  jpeg_decompress_struct& cinfo = reader.cinfo;
  const std::uint64_t num_pixels = std::uint64_t{cinfo.image_width} * cinfo.image_height;
  if (num_pixels > kMaxPixels)
    refuse(reader, "%u x %u pixels, more than %llu are not read", cinfo.image_width, cinfo.image_height,
           Number{kMaxPixels});
  if (!cinfo.arith_code && num_pixels > kMaxPixelsPerByte * jpeg.size)
    refuse(reader, "%u x %u pixels cannot be stored in %llu bytes", cinfo.image_width, cinfo.image_height,
           Number{jpeg.size});
  if (!jpeg_has_multiple_scans(&cinfo)) return;
  const std::uint64_t num_scans = count_scans(jpeg), most = std::min(kMaxScans, kMaxScannedPixels / num_pixels);
  if (num_scans > most)
    refuse(reader, "%llu scans of %u x %u pixels, more than %llu are not read", Number{num_scans}, cinfo.image_width,
           cinfo.image_height, Number{most});
}

// Jumps to the caller's setjmp if the header is unusable.
void read_and_check_header(Decompressor& reader, Bytes jpeg, bool keep_exif) {
  jpeg_create_decompress(&reader.cinfo);
  reader.cinfo.mem->max_memory_to_use = static_cast<long>(kMaxLibraryBytes);
  if (keep_exif) jpeg_save_markers(&reader.cinfo, JPEG_APP0 + 1, 0xFFFF);
  jpeg_mem_src(&reader.cinfo, jpeg.data, jpeg.size);
  jpeg_read_header(&reader.cinfo, TRUE);
  check_cost(reader, jpeg);
}

// Adobe stores inverted ink, 0..255. The product is the formula of Pillow, so that both give the same result.
void cmyk_to_rgb(const JSAMPLE* cmyk, bool inverted, int width, std::uint8_t* rgb) {
  for (int x = 0; x < width; ++x, cmyk += 4, rgb += 3) {
    for (int c = 0; c < 3; ++c) {
      const int ink = inverted ? cmyk[c] : 255 - cmyk[c];
      const int black = inverted ? cmyk[3] : 255 - cmyk[3];
      rgb[c] = static_cast<std::uint8_t>((ink * black + 127) / 255);
    }
  }
}

bool fail(const ErrorManager& errors, Diagnosis& diagnosis) {
  diagnosis.damage = errors.message;
  return false;
}

}  // namespace

bool is_jpeg(Bytes file) {
  return file.size >= 3 && file.data[0] == 0xFF && file.data[1] == 0xD8 && file.data[2] == 0xFF;
}

bool read_header(Bytes jpeg, JpegHeader& header, Diagnosis& diagnosis) {
  Decompressor reader(diagnosis);
  if (setjmp(reader.errors.jump)) return fail(reader.errors, diagnosis);
  read_and_check_header(reader, jpeg, /*keep_exif=*/true);
  header.width = static_cast<int>(reader.cinfo.image_width);
  header.height = static_cast<int>(reader.cinfo.image_height);
  header.orientation = exif_orientation(reader.cinfo.marker_list);
  header.convertible = !is_cmyk(reader.cinfo);
  return true;
}

bool decode(Bytes jpeg, int reduction, Image& image, Diagnosis& diagnosis) {
  Decompressor reader(diagnosis);
  std::vector<JSAMPLE> cmyk;  // declared before setjmp, because a longjmp must not skip its destructor
  jpeg_decompress_struct& cinfo = reader.cinfo;
  if (setjmp(reader.errors.jump)) return fail(reader.errors, diagnosis);
  read_and_check_header(reader, jpeg, /*keep_exif=*/false);
  const bool from_cmyk = is_cmyk(cinfo);
  cinfo.out_color_space = from_cmyk ? JCS_CMYK : JCS_RGB;
  cinfo.dct_method = JDCT_ISLOW;
  cinfo.scale_num = 1;
  cinfo.scale_denom = static_cast<unsigned>(reduction);
  jpeg_start_decompress(&cinfo);
  image.reset(static_cast<int>(cinfo.output_width), static_cast<int>(cinfo.output_height));
  if (from_cmyk) cmyk.resize(static_cast<std::size_t>(image.width) * 4);
  while (cinfo.output_scanline < cinfo.output_height) {
    const int y = static_cast<int>(cinfo.output_scanline);
    JSAMPROW row = from_cmyk ? cmyk.data() : image.row(y);
    jpeg_read_scanlines(&cinfo, &row, 1);
    if (from_cmyk) cmyk_to_rgb(cmyk.data(), cinfo.saw_Adobe_marker, image.width, image.row(y));
  }
  jpeg_finish_decompress(&cinfo);
  return diagnosis.damage.empty();
}

bool decode_region(Bytes jpeg, int width, int height, const Region& region, Image& image, int& origin_x, int& origin_y,
                   Diagnosis& diagnosis) {
  Decompressor reader(diagnosis);
  jpeg_decompress_struct& cinfo = reader.cinfo;
  if (setjmp(reader.errors.jump)) return fail(reader.errors, diagnosis);
  read_and_check_header(reader, jpeg, /*keep_exif=*/false);
  if (is_cmyk(cinfo) || static_cast<int>(cinfo.image_width) != width ||
      static_cast<int>(cinfo.image_height) != height) {
    refuse(reader, "%u x %u pixels%s, not as prepared", cinfo.image_width, cinfo.image_height,
           is_cmyk(cinfo) ? " of CMYK" : "");
  }
  cinfo.out_color_space = JCS_RGB;
  cinfo.dct_method = JDCT_ISLOW;
  jpeg_start_decompress(&cinfo);
  // Chroma is interpolated from its neighbours, which are missing at the edges of a cut. Therefore keep one more block.
  constexpr int kMargin = 16;
  JDIMENSION left = static_cast<JDIMENSION>(region.left > kMargin ? region.left - kMargin : 0);
  const int right = region.right + kMargin;
  JDIMENSION columns = static_cast<JDIMENSION>(right < width ? right : width) - left;
  // A cut that saves less than a quarter of the columns costs more than it saves.
  if (columns * 4 < cinfo.image_width * 3) {
    jpeg_crop_scanline(&cinfo, &left, &columns);
  } else {
    left = 0;
    columns = cinfo.image_width;
  }
  if (region.top > 0) jpeg_skip_scanlines(&cinfo, static_cast<JDIMENSION>(region.top));
  origin_x = static_cast<int>(left);
  origin_y = region.top;
  image.reset(static_cast<int>(columns), region.bottom - region.top);
  while (static_cast<int>(cinfo.output_scanline) < region.bottom) {
    JSAMPROW row = image.row(static_cast<int>(cinfo.output_scanline) - region.top);
    if (jpeg_read_scanlines(&cinfo, &row, 1) == 0) break;
  }
  jpeg_abort_decompress(&cinfo);
  return diagnosis.damage.empty();
}

bool encode(const Image& image, int quality, std::string& jpeg, std::string& error) {
  Compressor writer;
  jpeg_compress_struct& cinfo = writer.cinfo;
  if (setjmp(writer.errors.jump)) {
    error = writer.errors.message;
    return false;
  }
  jpeg_create_compress(&cinfo);
  jpeg_mem_dest(&cinfo, &writer.buffer, &writer.size);
  cinfo.image_width = static_cast<JDIMENSION>(image.width);
  cinfo.image_height = static_cast<JDIMENSION>(image.height);
  cinfo.input_components = 3;
  cinfo.in_color_space = JCS_RGB;
  jpeg_set_defaults(&cinfo);
  jpeg_set_quality(&cinfo, quality, TRUE);
  jpeg_start_compress(&cinfo, TRUE);
  while (cinfo.next_scanline < cinfo.image_height) {
    // libjpeg does not write through this pointer, but its signature has no const.
    JSAMPROW row = const_cast<JSAMPROW>(image.row(static_cast<int>(cinfo.next_scanline)));
    jpeg_write_scanlines(&cinfo, &row, 1);
  }
  jpeg_finish_compress(&cinfo);
  jpeg.assign(reinterpret_cast<const char*>(writer.buffer), writer.size);
  return true;
}

}  // namespace fastcssl::codec
