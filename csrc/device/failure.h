// A CUDA call that was refused, and what a user reads of it. Plain C++: no torch, no CUDA header.
#pragma once

#include <string>

namespace fastcssl::device {

struct Failure {
  int error = 0;           // a cudaError_t; 0: none
  const char* where = "";  // the kernel, or the step before its launch

  explicit operator bool() const { return error != 0; }
};

// The operator, the kernel, CUDA's own words, and what to do where that is known.
std::string explain(const char* op, const Failure& failure);

// What this library holds, separated by ";": sm_80 is machine code, compute_120 is PTX.
std::string cuda_architectures();

}  // namespace fastcssl::device
