#include "transcode.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "../file_error.h"
#include "resize.h"

namespace fastcssl::codec {
namespace {

struct Plan {
  int width, height;  // as stored
  Box box;            // of the upright source, in its pixels
};

Plan plan_for(int width, int height, const Settings& settings) {
  Plan plan{width, height, {0.0, 0.0, double(width), double(height)}};
  if (settings.fit == Fit::square) {
    const double side = std::min(width, height);
    plan.width = plan.height = settings.size;
    plan.box.left = std::floor((width - side) / 2);
    plan.box.top = std::floor((height - side) / 2);
    plan.box.right = plan.box.left + side;
    plan.box.bottom = plan.box.top + side;
  } else if (settings.fit != Fit::none) {
    const int side = settings.fit == Fit::short_side ? std::min(width, height) : std::max(width, height);
    if (side > settings.size) {
      const double ratio = double(settings.size) / side;
      plan.width = std::max(1, static_cast<int>(std::lround(width * ratio)));
      plan.height = std::max(1, static_cast<int>(std::lround(height * ratio)));
    }
  }
  return plan;
}

bool keeps_size(const Plan& plan, int width, int height) { return plan.width == width && plan.height == height; }

// Returns the largest reduction that still leaves twice the stored size, so that the later filter determines the
// quality.
int reduction_for(const Plan& plan, const JpegHeader& header, bool swapped) {
  const double box_width = plan.box.right - plan.box.left, box_height = plan.box.bottom - plan.box.top;
  int reduction = 1;
  if (!keeps_size(plan, swapped ? header.height : header.width, swapped ? header.width : header.height))
    while (reduction < 8 && box_width >= 4.0 * reduction * plan.width && box_height >= 4.0 * reduction * plan.height)
      reduction *= 2;
  return reduction;
}

// Undoes the EXIF orientation. Values 5 to 8 swap width and height.
Image upright(Image image, int orientation) {
  if (orientation <= 1) return image;
  Image out;
  const int w = image.width, h = image.height;
  const bool swapped = orientation >= 5;
  out.reset(swapped ? h : w, swapped ? w : h);
  for (int y = 0; y < out.height; ++y) {
    for (int x = 0; x < out.width; ++x) {
      int sx = x, sy = y;
      // clang-format off
      switch (orientation) {
        case 2: sx = w - 1 - x; break;
        case 3: sx = w - 1 - x; sy = h - 1 - y; break;
        case 4: sy = h - 1 - y; break;
        case 5: sx = y; sy = x; break;
        case 6: sx = y; sy = h - 1 - x; break;
        case 7: sx = w - 1 - y; sy = h - 1 - x; break;
        case 8: sx = w - 1 - y; sy = x; break;
      }
      // clang-format on
      std::memcpy(out.row(y) + x * 3, image.row(sy) + sx * 3, 3);
    }
  }
  return out;
}

void finish(Stored& stored, Image image, const Plan& plan, double scale, const Settings& settings) {
  if (!keeps_size(plan, image.width, image.height)) {
    Box box{plan.box.left * scale, plan.box.top * scale, plan.box.right * scale, plan.box.bottom * scale};
    box.right = std::min(box.right, double(image.width));
    box.bottom = std::min(box.bottom, double(image.height));
    Image resized;
    resized.reset(plan.width, plan.height);
    Resizer().run(image, box, Filter{}, plan.width, plan.height, resized.rgb.data());
    image = std::move(resized);
  }
  stored.width = image.width;
  stored.height = image.height;
  if (settings.want_jpeg && stored.jpeg.empty() && !encode(image, settings.quality, stored.jpeg, stored.fault)) {
    stored.status = Status::damaged;
    return;
  }
  if (settings.want_pixels) stored.image = std::move(image);
}

Stored damaged(std::string fault) {
  Stored stored;
  stored.status = Status::damaged;
  stored.fault = std::move(fault);
  return stored;
}

// Large images take turns, so that the memory does not grow with the number of threads. The mutex is never destroyed,
// because a thread may still hold it when the process ends.
constexpr std::uint64_t kLargePixels = 1 << 25, kLargeFileBytes = 1 << 26;
std::unique_lock<std::recursive_mutex> turn_if(bool is_large) {
  static std::recursive_mutex& turn = *new std::recursive_mutex;
  return is_large ? std::unique_lock(turn) : std::unique_lock(turn, std::defer_lock);
}

void note(Stored& stored, const Diagnosis& diagnosis) {
  stored.num_warnings = diagnosis.num_warnings;
  stored.first_warning = diagnosis.first_warning;
}

}  // namespace

Stored store_file(std::string file, const Settings& settings) {
  const Bytes jpeg{reinterpret_cast<const std::uint8_t*>(file.data()), file.size()};
  if (file.empty()) return damaged("the file is empty");
  if (!is_jpeg(jpeg)) {
    Stored stored;
    stored.status = Status::foreign;
    stored.file = std::move(file);
    return stored;
  }
  JpegHeader header;
  Diagnosis header_diagnosis;
  if (!read_header(jpeg, header, header_diagnosis)) return damaged(header_diagnosis.damage);

  const auto turn = turn_if(std::uint64_t(header.width) * header.height > kLargePixels);
  const bool swapped = header.orientation >= 5;
  const int width = swapped ? header.height : header.width, height = swapped ? header.width : header.height;
  const Plan plan = plan_for(width, height, settings);
  const bool pass =
      settings.want_jpeg && keeps_size(plan, width, height) && header.orientation == 1 && header.convertible;

  Stored stored;
  stored.passed_through = pass;
  Diagnosis diagnosis;
  if (pass && !settings.want_pixels) {
    stored.width = width;
    stored.height = height;
    Image thumbnail;
    if (settings.check_in_full && !decode(jpeg, 8, thumbnail, diagnosis)) return damaged(diagnosis.damage);
    note(stored, settings.check_in_full ? diagnosis : header_diagnosis);
    stored.jpeg = std::move(file);
    return stored;
  }
  Image image;
  const int reduction = reduction_for(plan, header, swapped);
  if (!decode(jpeg, reduction, image, diagnosis)) return damaged(diagnosis.damage);
  note(stored, diagnosis);
  if (pass) stored.jpeg = std::move(file);
  finish(stored, upright(std::move(image), header.orientation), plan, 1.0 / reduction, settings);
  return stored;
}

Stored store_pixels(Image image, const Settings& settings) {
  Stored stored;
  const Plan plan = plan_for(image.width, image.height, settings);
  finish(stored, std::move(image), plan, 1.0, settings);
  return stored;
}

Stored store_path(const std::string& path, const Settings& settings) {
  // Opening a pipe or a device may wait or have an effect, so look first. The file may change between the two calls:
  // O_NONBLOCK keeps the second from waiting, and the check is repeated on what was opened.
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return damaged(std::string("cannot be opened: ") + std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return damaged("is not a regular file");
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && (errno == EMFILE || errno == ENFILE)) throw FileError(errno, path);  // the image is not to blame
  if (fd < 0) return damaged(std::string("cannot be opened: ") + std::strerror(errno));
  const std::unique_ptr<const int, void (*)(const int*)> closing(&fd, [](const int* open) { ::close(*open); });
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return damaged("is not a regular file");
  const std::uint64_t size = static_cast<std::uint64_t>(info.st_size);
  if (size > kMaxFileBytes)
    return damaged(std::to_string(size) + " bytes, more than " + std::to_string(kMaxFileBytes) + " are not read");
  const auto turn = turn_if(size > kLargeFileBytes);
  std::string file(size, '\0');
  std::size_t done = 0;
  while (done < file.size()) {
    const ssize_t got = ::read(fd, file.data() + done, file.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return damaged(std::string("cannot be read: ") + std::strerror(errno));
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  file.resize(done);
  return store_file(std::move(file), settings);
}

}  // namespace fastcssl::codec
