// fastcssl.data._native: the Python interface of the loader's engine, and of the capabilities of this build.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "device/device.h"
#include "python_errors.h"
#include "views/engine.h"

namespace py = pybind11;
using namespace fastcssl::views;
using fastcssl::codec::Interpolation;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::vector<T> copied(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

View view_from(int size_px, bool bicubic, bool antialias, bool stop_at_box, const std::vector<float>& mean,
               const std::vector<float>& std) {
  if (size_px < 1 || mean.size() != 3 || std.size() != 3)
    throw std::invalid_argument("a view needs a positive size, three means and three standard deviations");
  View view;
  view.size_px = size_px;
  view.filter = {bicubic ? Interpolation::bicubic : Interpolation::bilinear, antialias, stop_at_box};
  for (int c = 0; c < 3; ++c) {
    view.normalisation.mean[c] = mean[static_cast<std::size_t>(c)];
    view.normalisation.std[c] = std[static_cast<std::size_t>(c)];
  }
  return view;
}

// Pointers are addresses of buffers that the caller keeps until wait() has returned. 0 means that there is no buffer.
std::shared_ptr<Job> submit(Engine& engine, const Array<std::int32_t>& shard_N, const Array<std::int64_t>& place_N,
                            const Array<std::int64_t>& bytes_N, const Array<std::int32_t>& width_N,
                            const Array<std::int32_t>& height_N, const Array<float>& box_VN4,
                            const Array<float>& columns_VNC, const std::vector<std::uintptr_t>& crops_V,
                            const std::vector<std::uintptr_t>& views_V, int type) {
  auto job = std::make_shared<Job>();
  job->shard_N = copied(shard_N);
  job->place_N = copied(place_N);
  job->bytes_N = copied(bytes_N);
  job->width_N = copied(width_N);
  job->height_N = copied(height_N);
  job->box_VN4 = copied(box_VN4);
  job->columns_VNC = copied(columns_VNC);
  for (const std::uintptr_t p : crops_V) job->crops_V.push_back(reinterpret_cast<std::uint8_t*>(p));
  for (const std::uintptr_t p : views_V) job->views_V.push_back(reinterpret_cast<void*>(p));
  job->type = static_cast<OutType>(type);
  const std::size_t samples = job->shard_N.size(), views = crops_V.size();
  if (job->place_N.size() != samples || job->bytes_N.size() != samples || job->width_N.size() != samples ||
      job->height_N.size() != samples || job->box_VN4.size() != views * samples * 4 || views_V.size() != views ||
      job->columns_VNC.size() != views * samples * kNumColumns)
    throw std::invalid_argument("the arrays of a job do not agree in their numbers of samples and views");
  py::gil_scoped_release release;
  engine.submit(job);
  return job;
}

// Returns the bytes of a file as an array that stays mapped as long as it lives, without a descriptor. (numpy's memmap
// keeps one per file.)
py::array_t<std::uint8_t> map_bytes(const std::string& path) {
  auto file = std::make_unique<MappedFile>(path);
  const std::uint8_t* data = file->data();
  const auto size = static_cast<py::ssize_t>(file->size());
  const py::capsule owner(file.release(), [](void* mapped) { delete static_cast<MappedFile*>(mapped); });
  py::array_t<std::uint8_t> bytes(size, data, owner);
  py::detail::array_proxy(bytes.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return bytes;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  py::register_exception<ShardFault>(m, "ShardFault");
  fastcssl::translate_file_errors();
  m.def("cuda_status", [] {
    fastcssl::device::CudaStatus status;
    {
      py::gil_scoped_release release;
      status = fastcssl::device::cuda_status();
    }
    py::dict out;
    out["built"] = status.built;
    out["toolkit"] = status.toolkit;
    out["architectures"] = status.architectures;
    out["num_devices"] = status.num_devices;
    out["problem"] = status.problem;
    return out;
  });
  m.attr("compiler") = __VERSION__;
  m.def("photometric_isa", [] { return std::string(photometric_isa()); });

  py::class_<View>(m, "View").def(py::init(&view_from), py::kw_only(), py::arg("size_px"), py::arg("bicubic"),
                                  py::arg("antialias"), py::arg("stop_at_box"), py::arg("mean"), py::arg("std"));
  m.def("map_bytes", &map_bytes, py::arg("path"));
  py::class_<Job, std::shared_ptr<Job>>(m, "Job").def_readonly("shard_fault", &Job::shard_fault);
  py::class_<Engine>(m, "Engine")
      .def(py::init([](const std::vector<View>& views, int num_threads) {
             if (num_threads < 1 || views.empty()) throw std::invalid_argument("an engine needs views and a thread");
             return std::make_unique<Engine>(views, num_threads);
           }),
           py::arg("views"), py::arg("num_threads"))
      .def("map", &Engine::map, py::arg("path"), py::arg("num_bytes"), py::call_guard<py::gil_scoped_release>())
      .def("map_array", &Engine::map_array, py::arg("path"), py::arg("num_bytes"), py::arg("data_offset"),
           py::arg("count"), py::arg("height"), py::arg("width"), py::call_guard<py::gil_scoped_release>())
      .def("submit", &submit, py::kw_only(), py::arg("shard_N"), py::arg("place_N"), py::arg("bytes_N"),
           py::arg("width_N"), py::arg("height_N"), py::arg("box_VN4"), py::arg("columns_VNC"), py::arg("crops_V"),
           py::arg("views_V"), py::arg("type"))
      .def(
          "wait",
          [](Engine& engine, Job& job) {
            {
              py::gil_scoped_release release;
              engine.wait(job);
            }
            return job.faults;
          },
          py::arg("job"))
      .def("cancel", &Engine::cancel, py::arg("job"), py::call_guard<py::gil_scoped_release>())
      .def("stage_seconds", [](Engine& engine) {
        const StageSeconds spent = engine.stage_seconds();
        py::dict out;
        out["read"] = spent.read;
        out["decode"] = spent.decode;
        out["crop"] = spent.crop;
        out["photometric"] = spent.photometric;
        return out;
      });
}
