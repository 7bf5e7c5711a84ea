// fastcssl._native: the Python face of what csrc compiles for training.
#include <pybind11/pybind11.h>

#include "device/device.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
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
}
