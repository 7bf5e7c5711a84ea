// What the CUDA half of this build can do on this machine. Plain C++: no torch, no CUDA header.
#pragma once

#include <string>

namespace fastcssl::device {

struct CudaStatus {
  bool built = false;         // the extension contains CUDA code
  std::string toolkit;        // the version that compiled it
  std::string architectures;  // the ones it was compiled for
  int num_devices = 0;        // GPUs that the driver shows
  std::string problem;        // why a kernel of this build does not run here; empty when it does
};

// Launches one tiny kernel on the current device, because "no kernel image" shows in no other way.
CudaStatus cuda_status();

}  // namespace fastcssl::device
