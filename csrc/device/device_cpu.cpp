// Replaces device_cuda.cu in a build without a CUDA toolkit.
#include "device.h"

namespace fastcssl::device {

CudaStatus cuda_status() {
  CudaStatus status;
  status.problem = "this build has no CUDA code; install with a CUDA toolkit on PATH and FASTCSSL_CUDA=1";
  return status;
}

}  // namespace fastcssl::device
