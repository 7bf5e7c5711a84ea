#include <cuda_runtime.h>

#include "failure.h"

namespace fastcssl::device {
namespace {

// "8.6", or nothing where the driver does not answer.
std::string capability() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return "";
  }
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string remedy(cudaError_t error) {
  const std::string card = capability();
  const std::string rebuild =
      " Reinstall fastcssl with TORCH_CUDA_ARCH_LIST" + (card.empty() ? " set to your card" : "='" + card + "'") + ".";
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return " This library holds " + cuda_architectures() + (card.empty() ? "" : ", the card is " + card) + "." +
             rebuild;
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorInvalidPtx:
      return " The driver is older than the toolkit that compiled fastcssl. Update the driver, or:" + rebuild;
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
      return " Check the driver with nvidia-smi, then run fastcssl-doctor.";
    case cudaErrorMisalignedAddress:
      return " A bank must begin at a multiple of 16 bytes: clone it.";
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
      return " CUDA reports late: an earlier kernel may be the cause. CUDA_LAUNCH_BLOCKING=1 shows which.";
    default:
      return " Run fastcssl-doctor.";
  }
}

}  // namespace

std::string explain(const char* op, const Failure& failure) {
  const cudaError_t error = static_cast<cudaError_t>(failure.error);
  return std::string(op) + ": CUDA refused " + failure.where + ": " + cudaGetErrorString(error) + " (" +
         cudaGetErrorName(error) + ", " + std::to_string(failure.error) + ")." + remedy(error);
}

std::string cuda_architectures() { return FASTCSSL_CUDA_ARCHITECTURES; }

}  // namespace fastcssl::device
