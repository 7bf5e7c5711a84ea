// Reports whether the CUDA code of this build runs on this machine. Plain C++: no torch, no CUDA header.
#pragma once

#include <string>

namespace fastcssl::device {

struct CudaStatus {
  bool built = false;         // the extension contains CUDA code
  std::string toolkit;        // the toolkit version that compiled it
  std::string architectures;  // the architectures it was compiled for
  int num_devices = 0;        // GPUs that the driver reports
  std::string problem;        // why a kernel of this build does not run here; empty if it does
};

// Launches a tiny kernel on the current device, because nothing else reveals the error "no kernel image".
CudaStatus cuda_status();

}  // namespace fastcssl::device
