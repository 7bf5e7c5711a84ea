// CUDA C++ as g++ sees it: the keywords, the built-in variables and functions, and the few host calls that our sources
// use. Whatever is missing here is a compile error, never a silent difference: add it below.
#pragma once

#if defined(__CUDACC__)
#error "the emulator is for g++"
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "scheduler.h"
#if defined(EMULATOR_PTX)
#include "ptx_watch.h"
#endif

// ---- keywords -------------------------------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

#define EMULATOR_SITE (::emulator::Site{__FILE__, __LINE__})
#define FASTCSSL_SHARED(Type, name)                                                                    \
  Type& name = *static_cast<Type*>(                                                                    \
      ::emulator::Scheduler::instance().shared_variable(EMULATOR_SITE, sizeof(Type), alignof(Type)))
#define FASTCSSL_DYNAMIC_SHARED(name) \
  unsigned char* name = static_cast<unsigned char*>(::emulator::Scheduler::instance().dynamic_shared())
#define FASTCSSL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::emulator::launch(kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

// ---- vector types and built-in variables ----------------------------------------------------------------------------
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline uint3 threadIdx{}, blockIdx{};
inline dim3 blockDim, gridDim;
constexpr int warpSize = emulator::kWarpSize;

// ---- host calls -----------------------------------------------------------------------------------------------------
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorMisalignedAddress = 716,
  cudaErrorLaunchFailure = 719,
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace emulator {

inline cudaError_t last_error = cudaSuccess;
inline std::map<const void*, std::size_t> max_dynamic_bytes;

inline void set_error(cudaError_t error, const std::string& message) {
  std::fprintf(stderr, "emulator: %s\n", message.c_str());
  if (last_error == cudaSuccess) last_error = error;
}

inline bool check_launch(const void* kernel, const dim3& grid, const dim3& block, std::size_t shared_bytes) {
  const std::uint64_t num_threads = std::uint64_t{block.x} * block.y * block.z;
  const auto found = max_dynamic_bytes.find(kernel);
  const std::size_t allowed = found == max_dynamic_bytes.end() ? std::size_t{48} << 10 : found->second;
  if (num_threads == 0 || num_threads > 1024 || block.z > 64 || grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 ||
      grid.y > 65535 || grid.z == 0 || grid.z > 65535) {
    set_error(cudaErrorInvalidConfiguration, "no GPU takes this grid or block");
  } else if (shared_bytes > allowed) {
    set_error(cudaErrorInvalidValue, std::to_string(shared_bytes) + " bytes of dynamic shared memory, " +
                                         std::to_string(allowed) + " allowed");
  } else {
    return true;
  }
  return false;
}

// Runs the kernel at once. Its failure shows where it would on a GPU: in cudaGetLastError.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t,
            Arguments&&... arguments) {
  if (!check_launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes)) return;
  std::tuple<Parameters...> packed(std::forward<Arguments>(arguments)...);
  gridDim = grid;
  blockDim = block;
  std::function<void()> body = [&] { std::apply(kernel, packed); };
#if defined(EMULATOR_PTX)
  // What nvcc made of the kernel runs in its place.
  ptx::Watch& watch = ptx::Watch::instance();
  const ptx::Watch::Run run = watch.begin_launch(reinterpret_cast<const void*>(kernel));
  if (run == nullptr) return set_error(cudaErrorLaunchFailure, "no PTX of the kernel was translated");
  const void* parameters[sizeof...(Parameters)];
  std::apply([&](auto&... each) { std::size_t i = 0; ((parameters[i++] = &each), ...); }, packed);
  body = [&] { run(parameters); };
  shared_bytes = watch.shared_bytes(shared_bytes);
#endif
  const auto set_block = [](const Dim& at) {
#if defined(EMULATOR_PTX)
    ptx::Watch::instance().begin_block();
#endif
    blockIdx = {at.x, at.y, at.z};
  };
  const std::string failure =
      Scheduler::instance().run_grid({grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, body, set_block,
                                     [](const Dim& at) { threadIdx = {at.x, at.y, at.z}; });
#if defined(EMULATOR_PTX)
  watch.end_launch();
  watch.report();
#endif
  if (!failure.empty()) set_error(cudaErrorLaunchFailure, failure);
}

}  // namespace emulator

inline cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
inline cudaError_t cudaPeekAtLastError() { return emulator::last_error; }
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  if (value < 0 || value > 227 << 10) return cudaErrorInvalidValue;
  emulator::max_dynamic_bytes[reinterpret_cast<const void*>(kernel)] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

// A device of EMULATOR_MULTIPROCESSORS (4, if unset) of 100 kB and 1536 threads each; registers are not its business.
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  const char* text = std::getenv("EMULATOR_MULTIPROCESSORS");
  *value = text == nullptr ? 4 : std::atoi(text);
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int num_threads, std::size_t shared_bytes) {
  *blocks = static_cast<int>(std::min<std::size_t>(1536 / num_threads, (100 << 10) / (shared_bytes + (1 << 10))));
  return cudaSuccess;
}

// ---- barriers and warp collectives ----------------------------------------------------------------------------------
#define __syncthreads() ::emulator::Scheduler::instance().block_barrier(EMULATOR_SITE)
#define __syncwarp(...) ::emulator::warp_barrier(EMULATOR_SITE __VA_OPT__(,) __VA_ARGS__)
#define __shfl_sync(mask, ...) ::emulator::shuffle(EMULATOR_SITE, "__shfl_sync", mask, __VA_ARGS__)
#define __shfl_xor_sync(mask, ...) ::emulator::shuffle(EMULATOR_SITE, "__shfl_xor_sync", mask, __VA_ARGS__)
#define __shfl_up_sync(mask, ...) ::emulator::shuffle(EMULATOR_SITE, "__shfl_up_sync", mask, __VA_ARGS__)
#define __shfl_down_sync(mask, ...) ::emulator::shuffle(EMULATOR_SITE, "__shfl_down_sync", mask, __VA_ARGS__)
#define __ballot_sync(mask, predicate) ::emulator::ballot(EMULATOR_SITE, mask, predicate)
#define __any_sync(mask, predicate) (::emulator::ballot(EMULATOR_SITE, mask, predicate) != 0)
#define __all_sync(mask, predicate) (::emulator::ballot(EMULATOR_SITE, mask, !(predicate)) == 0)

namespace emulator {

inline void warp_barrier(const Site& site, std::uint32_t mask = 0xffffffffu) {
  Scheduler::instance().exchange("__syncwarp", mask, "", 1, site);
}

inline std::uint32_t ballot(const Site& site, std::uint32_t mask, bool predicate) {
  std::uint32_t present = 0, votes = 0;
  const unsigned char mine = predicate;
  const unsigned char* all = Scheduler::instance().exchange("__ballot_sync", mask, &mine, 1, site, &present);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (present >> lane & 1u) votes |= std::uint32_t{all[lane]} << lane;
  }
  return votes;
}

template <class T>
T shuffle(const Site& site, const char* operation, std::uint32_t mask, T value, int argument, int width = kWarpSize) {
  Scheduler& scheduler = Scheduler::instance();
  const int lane = scheduler.lane(), first = lane / width * width;
  std::uint32_t present = 0;
  const unsigned char* all = scheduler.exchange(operation, mask, &value, sizeof value, site, &present);
  const std::string kind = operation;
  int source = first + (argument & (width - 1));
  if (kind == "__shfl_xor_sync") source = lane ^ argument;
  if (kind == "__shfl_up_sync") source = lane - argument;
  if (kind == "__shfl_down_sync") source = lane + argument;
  const bool inside = kind == "__shfl_xor_sync" ? source < first + width : source >= first && source < first + width;
  if (!inside) return value;
  if ((present >> source & 1u) == 0) {
    scheduler.fail(kind + " at " + site.file + ":" + std::to_string(site.line) + " reads lane " +
                   std::to_string(source) + ", which takes no part");
  }
  T out;
  std::memcpy(&out, all + source * sizeof(T), sizeof(T));
  return out;
}

}  // namespace emulator

// ---- arithmetic; threads switch at barriers and collectives only, so atomics need no care ---------------------------
using std::max;
using std::min;

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T atomicAdd(T* address, T value) {
  return std::exchange(*address, static_cast<T>(*address + value));
}
template <class T>
T atomicMax(T* address, T value) {
  return std::exchange(*address, std::max(*address, value));
}
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0, as on the GPU
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(std::uint64_t{a} * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
