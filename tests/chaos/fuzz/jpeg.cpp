// Fuzzes the codec as prep uses it: any file through every way to store it. Input: five bytes of settings, the file.
#include <cstdlib>
#include <string>

#include "codec/transcode.h"
#include "input.h"

using namespace fastcssl::codec;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  Settings settings;
  settings.fit = static_cast<Fit>(input.take<std::uint8_t>() % 4);
  settings.size = 8 + input.take<std::uint8_t>() % 120;
  settings.quality = 1 + input.take<std::uint8_t>() % 100;
  settings.check_in_full = input.take<std::uint8_t>() % 4 != 0;
  const std::uint8_t wanted = input.take<std::uint8_t>() % 3;
  settings.want_jpeg = wanted != 1;
  settings.want_pixels = wanted != 0;
  const Stored stored =
      store_file(std::string(reinterpret_cast<const char*>(input.rest()), input.num_left()), settings);
  if (stored.status == Status::damaged && stored.fault.empty()) std::abort();
  if (stored.status != Status::ok) return 0;
  // What prep stores must be readable: it is decoded again by verify and by every training.
  if (settings.want_pixels && stored.image.rgb.size() < stored.image.num_bytes()) std::abort();
  if (settings.want_jpeg && settings.check_in_full) {
    Settings again;
    again.want_pixels = true;
    const Stored read = store_file(stored.jpeg, again);
    if (read.status != Status::ok || read.width != stored.width || read.height != stored.height) std::abort();
  }
  return 0;
}
