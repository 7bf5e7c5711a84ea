// Registers fastcssl's operators with torch's dispatcher through its stable ABI: one build works with every torch from
// TORCH_TARGET_VERSION on. This file checks shapes and types; the kernels take plain pointers.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "refuse.h"
#include "views/photometric.h"

namespace {

using fastcssl::refuse;
using fastcssl::shape_of;
using fastcssl::views::Normalisation;
using fastcssl::views::OutType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Request {
  Tensor crops, columns;  // contiguous
  int num_images, height, width;
  Normalisation normalisation;
  OutType type;
};

OutType out_type(ScalarType dtype) {
  if (dtype == ScalarType::Float) return OutType::float32;
  if (dtype == ScalarType::BFloat16) return OutType::bfloat16;
  if (dtype == ScalarType::Half) return OutType::float16;
  refuse("photometric: dtype must be float32, bfloat16 or float16");
}

Request check(const Tensor& crops, const Tensor& columns, const std::vector<double>& mean,
              const std::vector<double>& std_dev, ScalarType dtype) {
  using fastcssl::views::kNumColumns;
  if (crops.dim() != 4 || crops.size(3) != 3) {
    refuse("photometric: crops must be [N, H, W, 3], but is ", shape_of(crops));
  }
  if (crops.scalar_type() != ScalarType::Byte) refuse("photometric: crops must be uint8");
  if (columns.dim() != 2 || columns.size(0) != crops.size(0) || columns.size(1) != kNumColumns) {
    refuse("photometric: columns must be [N, ", int{kNumColumns}, "] with N = ", crops.size(0), ", but is ",
           shape_of(columns));
  }
  if (columns.scalar_type() != ScalarType::Float) refuse("photometric: columns must be float32");
  const bool together =
      crops.is_cpu() ? columns.is_cpu() : columns.is_cuda() && crops.get_device_index() == columns.get_device_index();
  if (!together) refuse("photometric: crops and columns must be on the same device");
  for (int i = 0; i < 3; ++i) {
    if (crops.size(i) > std::numeric_limits<int>::max()) refuse("photometric: crops is too large, ", shape_of(crops));
  }
  if (mean.size() != 3) refuse("photometric: mean must have 3 values, but has ", mean.size());
  if (std_dev.size() != 3) refuse("photometric: std must have 3 values, but has ", std_dev.size());
  Request request{torch::stable::contiguous(crops),
                  torch::stable::contiguous(columns),
                  static_cast<int>(crops.size(0)),
                  static_cast<int>(crops.size(1)),
                  static_cast<int>(crops.size(2)),
                  {},
                  out_type(dtype)};
  for (int c = 0; c < 3; ++c) {
    if (!(std_dev[c] > 0.0)) refuse("photometric: std must be positive, but has ", std_dev[c]);
    request.normalisation.mean[c] = static_cast<float>(mean[c]);
    request.normalisation.std[c] = static_cast<float>(std_dev[c]);
  }
  return request;
}

Tensor channels_last(const Request& request, ScalarType dtype) {
  const std::vector<std::int64_t> size{request.num_images, 3, request.height, request.width};
  return torch::stable::empty(size, dtype, std::nullopt, request.crops.device(), std::nullopt,
                              torch::headeronly::MemoryFormat::ChannelsLast);
}

struct AlignedDelete {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};

Tensor photometric_cpu(Tensor crops, Tensor columns, std::vector<double> mean, std::vector<double> std_dev,
                       ScalarType dtype) {
  const Request request = check(crops, columns, mean, std_dev, dtype);
  Tensor out = channels_last(request, dtype);
  if (out.numel() == 0) return out;
  const std::size_t num_values = std::size_t{3} * request.height * request.width;
  const auto* from = static_cast<const std::uint8_t*>(request.crops.const_data_ptr());
  const auto* parameters = static_cast<const float*>(request.columns.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const std::size_t image_bytes = num_values * out.element_size();
  // Some samples cost five times as much as others, so each thread fetches the next sample when it is free.
  std::atomic<int> next{0};
  const int workers = std::min<int>(torch::stable::get_num_threads(), request.num_images);
  torch::stable::parallel_for(0, workers, 1, [&](std::int64_t, std::int64_t) {
    const std::size_t bytes = fastcssl::views::photometric_scratch_bytes(request.height, request.width);
    const std::unique_ptr<void, AlignedDelete> scratch(::operator new(bytes, std::align_val_t{64}));
    for (int i = next++; i < request.num_images; i = next++) {
      fastcssl::views::photometric_image(from + i * num_values, request.height, request.width,
                                         parameters + std::size_t{fastcssl::views::kNumColumns} * i,
                                         request.normalisation, request.type, to + i * image_bytes, scratch.get());
    }
  });
  return out;
}

#ifdef FASTCSSL_WITH_CUDA
Tensor photometric_cuda(Tensor crops, Tensor columns, std::vector<double> mean, std::vector<double> std_dev,
                        ScalarType dtype) {
  const torch::stable::accelerator::DeviceGuard guard(crops.get_device_index());
  const Request request = check(crops, columns, mean, std_dev, dtype);
  Tensor out = channels_last(request, dtype);
  if (out.numel() == 0) return out;
  const std::size_t bytes =
      fastcssl::views::photometric_cuda_workspace_bytes(request.num_images, request.height, request.width);
  // Freed when this function returns. The caching allocator reuses it only for later work of the same stream.
  const std::vector<std::int64_t> workspace_size{static_cast<std::int64_t>(bytes)};
  Tensor workspace = torch::stable::empty(workspace_size, ScalarType::Byte, std::nullopt, request.crops.device());
  const auto stream = torch::stable::accelerator::getCurrentStream(crops.get_device_index());
  const fastcssl::device::Failure failure = fastcssl::views::photometric_cuda(
      static_cast<const std::uint8_t*>(request.crops.const_data_ptr()), request.num_images, request.height,
      request.width, static_cast<const float*>(request.columns.const_data_ptr()), request.normalisation, request.type,
      out.mutable_data_ptr(), workspace.mutable_data_ptr(), stream.nativeHandle());
  if (failure) refuse(explain("photometric", failure));
  return out;
}
#endif

// Returns the instruction set that the CPU path uses. For tests, a name chooses one and "auto" undoes the choice.
std::string photometric_isa(std::string choose) {
  if (choose == "auto") {
    fastcssl::views::photometric_force_isa(nullptr);
  } else if (!choose.empty() && !fastcssl::views::photometric_force_isa(choose.c_str())) {
    refuse("photometric_isa: this processor has no '", choose, "'; use avx512, avx2, portable or auto");
  }
  return fastcssl::views::photometric_isa();
}

// What the library holds for cards: "sm_80;...;compute_120"; "" without CUDA.
std::string cuda_architectures() {
#ifdef FASTCSSL_WITH_CUDA
  return fastcssl::device::cuda_architectures();
#else
  return "";
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY(fastcssl, m) {
  m.def("photometric(Tensor crops, Tensor columns, float[] mean, float[] std, ScalarType dtype) -> Tensor");
  m.def("photometric_isa(str choose=\"\") -> str");
  m.def("cuda_architectures() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fastcssl, CPU, m) { m.impl("photometric", TORCH_BOX(&photometric_cpu)); }

#ifdef FASTCSSL_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fastcssl, CUDA, m) { m.impl("photometric", TORCH_BOX(&photometric_cuda)); }
#endif

STABLE_TORCH_LIBRARY_IMPL(fastcssl, CompositeExplicitAutograd, m) {
  m.impl("photometric_isa", TORCH_BOX(&photometric_isa));
  m.impl("cuda_architectures", TORCH_BOX(&cuda_architectures));
}
