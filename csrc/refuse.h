// Errors of the operators for tensors that do not fit.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fastcssl {
namespace {

// Throws an error with the sentence alone, without the file and line that STD_TORCH_CHECK puts before it.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

inline std::string shape_of(const torch::stable::Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << "]";
  return text.str();
}

}  // namespace
}  // namespace fastcssl
