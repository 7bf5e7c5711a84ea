// dataprep._codec: the Python interface of the codec. Every call that takes time releases the interpreter lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "../python_errors.h"
#include "jpeg.h"
#include "pool.h"
#include "resize.h"
#include "transcode.h"

namespace py = pybind11;
using namespace fastcssl::codec;

namespace {

Image image_from(const py::buffer& pixels) {
  const py::buffer_info info = pixels.request();
  if (info.ndim != 3 || info.shape[2] != 3 || info.itemsize != 1 || info.shape[0] < 1 || info.shape[1] < 1)
    throw std::invalid_argument("pixels must be a non-empty uint8 array of shape [height, width, 3]");
  if (info.strides[2] != 1 || info.strides[1] != 3 || info.strides[0] != info.shape[1] * 3)
    throw std::invalid_argument("pixels must be contiguous");
  Image image;
  image.reset(static_cast<int>(info.shape[1]), static_cast<int>(info.shape[0]));
  std::memcpy(image.rgb.data(), info.ptr, image.num_bytes());
  return image;
}

py::bytes bytes_of(const Image& image) {
  return py::bytes(reinterpret_cast<const char*>(image.rgb.data()), image.num_bytes());
}

Settings settings_from(const std::string& fit, int size, int quality, bool check_in_full, bool want_jpeg,
                       bool want_pixels) {
  Settings settings;
  if (fit == "none") settings.fit = Fit::none;
  else if (fit == "short") settings.fit = Fit::short_side;
  else if (fit == "max") settings.fit = Fit::max_side;
  else if (fit == "square") settings.fit = Fit::square;
  else throw std::invalid_argument("fit must be none, short, max or square, not '" + fit + "'");
  if (settings.fit != Fit::none && size < 1) throw std::invalid_argument("size must be positive");
  if (quality < 1 || quality > 100) throw std::invalid_argument("quality must be between 1 and 100");
  settings.size = size;
  settings.quality = quality;
  settings.check_in_full = check_in_full;
  settings.want_jpeg = want_jpeg;
  settings.want_pixels = want_pixels;
  return settings;
}

// The settings and threads that `dataprep.encode` uses.
class Transcoder {
 public:
  Transcoder(const Settings& settings, int num_threads) : settings_(settings), pool_(num_threads) {}

  void submit_path(std::string path) {
    pool_.submit([path = std::move(path), settings = settings_] { return store_path(path, settings); });
  }
  void submit_file(std::string file) {
    auto shared = std::make_shared<std::string>(std::move(file));
    pool_.submit([shared, settings = settings_] { return store_file(std::move(*shared), settings); });
  }
  void submit_pixels(const py::buffer& pixels) {
    auto shared = std::make_shared<Image>(image_from(pixels));
    pool_.submit([shared, settings = settings_] { return store_pixels(std::move(*shared), settings); });
  }
  // Runs in the calling thread.
  Stored store_now(const py::buffer& pixels) {
    Image image = image_from(pixels);
    py::gil_scoped_release release;
    return store_pixels(std::move(image), settings_);
  }
  std::optional<Stored> pop(double seconds) {
    py::gil_scoped_release release;
    return pool_.pop(seconds);
  }

 private:
  Settings settings_;
  Pool<Stored> pool_;
};

}  // namespace

PYBIND11_MODULE(_codec, m) {
  fastcssl::translate_file_errors();
  m.attr("MAX_PIXELS") = kMaxPixels;
  py::enum_<Status>(m, "Status")
      .value("ok", Status::ok)
      .value("foreign", Status::foreign)
      .value("damaged", Status::damaged);

  py::class_<Stored>(m, "Stored")
      .def_readonly("status", &Stored::status)
      .def_readonly("passed_through", &Stored::passed_through)
      .def_readonly("width", &Stored::width)
      .def_readonly("height", &Stored::height)
      .def_readonly("fault", &Stored::fault)
      .def_readonly("num_warnings", &Stored::num_warnings)
      .def_readonly("first_warning", &Stored::first_warning)
      .def_property_readonly("jpeg", [](const Stored& s) { return py::bytes(s.jpeg); })
      .def_property_readonly("file", [](const Stored& s) { return py::bytes(s.file); })
      .def_property_readonly("pixels", [](const Stored& s) { return bytes_of(s.image); });

  py::class_<Transcoder>(m, "Transcoder")
      .def(py::init([](const std::string& fit, int size, int quality, bool check_in_full, bool want_jpeg,
                       bool want_pixels, int num_threads) {
             if (num_threads < 1) throw std::invalid_argument("num_threads must be positive");
             return std::make_unique<Transcoder>(
                 settings_from(fit, size, quality, check_in_full, want_jpeg, want_pixels), num_threads);
           }),
           py::kw_only(), py::arg("fit"), py::arg("size"), py::arg("quality"), py::arg("check_in_full"),
           py::arg("want_jpeg"), py::arg("want_pixels"), py::arg("num_threads"))
      .def("submit_path", &Transcoder::submit_path, py::arg("path"))
      .def(
          "submit_file", [](Transcoder& t, const py::bytes& file) { t.submit_file(file); }, py::arg("file"))
      .def("submit_pixels", &Transcoder::submit_pixels, py::arg("pixels"))
      .def("pop", &Transcoder::pop, py::arg("seconds"))
      .def("store_pixels", &Transcoder::store_now, py::arg("pixels"));

  m.def(
      "encode",
      [](const py::buffer& pixels, int quality) {
        const Image image = image_from(pixels);
        std::string jpeg, error;
        {
          py::gil_scoped_release release;
          encode(image, quality, jpeg, error);
        }
        if (!error.empty()) throw std::invalid_argument(error);
        return py::bytes(jpeg);
      },
      py::arg("pixels"), py::arg("quality"));

  m.def(
      "decode",
      [](const py::bytes& jpeg, int reduction) {
        const std::string_view view = jpeg;
        Image image;
        Diagnosis diagnosis;
        bool intact;
        {
          py::gil_scoped_release release;
          intact =
              decode({reinterpret_cast<const std::uint8_t*>(view.data()), view.size()}, reduction, image, diagnosis);
        }
        if (!intact) throw std::invalid_argument(diagnosis.damage);
        return py::make_tuple(bytes_of(image), image.height, image.width);
      },
      py::arg("jpeg"), py::arg("reduction") = 1,
      "Returns the RGB bytes, height and width of a JPEG. Raises ValueError if it is damaged.");

  m.def(
      "resize",
      [](const py::buffer& pixels, double left, double top, double right, double bottom, int height, int width,
         bool bicubic, bool antialias, bool stop_at_box, bool portable) {
        const Image source = image_from(pixels);
        if (!(0 <= left && left < right && right <= source.width && 0 <= top && top < bottom &&
              bottom <= source.height))
          throw std::invalid_argument("the box must lie inside the image and not be empty");
        if (height < 1 || width < 1) throw std::invalid_argument("height and width must be positive");
        Image out;
        {
          py::gil_scoped_release release;
          out.reset(width, height);
          const Filter filter{bicubic ? Interpolation::bicubic : Interpolation::bilinear, antialias, stop_at_box};
          Resizer().run(source, {left, top, right, bottom}, filter, width, height, out.rgb.data(),
                        portable ? Isa::portable : best_isa());
        }
        return bytes_of(out);
      },
      py::arg("pixels"), py::kw_only(), py::arg("left"), py::arg("top"), py::arg("right"), py::arg("bottom"),
      py::arg("height"), py::arg("width"), py::arg("bicubic") = true, py::arg("antialias") = true,
      py::arg("stop_at_box") = false, py::arg("portable") = false);

  m.def(
      "decode_region",
      [](const py::bytes& jpeg, int width, int height, int left, int top, int right, int bottom) {
        if (left < 0 || top < 0 || right <= left || bottom <= top || right > width || bottom > height)
          throw std::invalid_argument("the region must lie inside the image and not be empty");
        const std::string_view view = jpeg;
        Image image;
        Diagnosis diagnosis;
        int x = 0, y = 0;
        bool intact;
        {
          py::gil_scoped_release release;
          intact = decode_region({reinterpret_cast<const std::uint8_t*>(view.data()), view.size()}, width, height,
                                 {left, top, right, bottom}, image, x, y, diagnosis);
        }
        if (!intact) throw std::invalid_argument(diagnosis.damage);
        return py::make_tuple(bytes_of(image), image.height, image.width, x, y);
      },
      py::arg("jpeg"), py::arg("width"), py::arg("height"), py::arg("left"), py::arg("top"), py::arg("right"),
      py::arg("bottom"));

  m.def("instruction_set", [] { return best_isa() == Isa::avx2 ? "avx2" : "portable"; });
}
