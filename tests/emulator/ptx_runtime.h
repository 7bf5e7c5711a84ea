// What translated PTX calls (ptx.py): the instructions that are not plain arithmetic, on the emulator's threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "ptx_watch.h"
#include "tensor_core.h"

namespace ptx {

template <class T, int kCount>
struct Values {
  T at[kCount];
};

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a register is as wide as its value");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------
template <class T>
T larger(T a, T b) {
  if constexpr (std::is_same_v<T, float>) return std::fmax(a, b);
  return a > b ? a : b;
}
template <class T>
T smaller(T a, T b) {
  if constexpr (std::is_same_v<T, float>) return std::fmin(a, b);
  return a < b ? a : b;
}
template <class T>
T checked_divisor(T by) {
  if (by == 0) ::emulator::Scheduler::instance().fail("a division by zero");
  return by;
}
template <class T>
T divided(T a, T b) {
  return a / checked_divisor(b);
}
template <class T>
T remainder(T a, T b) {
  return a % checked_divisor(b);
}
// Counts are clamped to the width, not taken modulo it.
template <class T>
T shifted_left(T value, std::uint32_t count) {
  return count < sizeof(T) * 8 ? static_cast<T>(static_cast<std::make_unsigned_t<T>>(value) << count) : T{0};
}
template <class T>
T shifted_right(T value, std::uint32_t count) {
  if (count < sizeof(T) * 8) return value >> count;
  return value < 0 ? static_cast<T>(-1) : T{0};
}
// The lowest `count` bits of `bits`, in the place of those from `first` on.
inline std::uint32_t inserted(std::uint32_t bits, std::uint32_t into, std::uint32_t first, std::uint32_t count) {
  const std::uint32_t mask = shifted_left((count < 32 ? 1u << count : 0u) - 1u, first);
  return (into & ~mask) | (shifted_left(bits, first) & mask);
}
inline float rounded_down(double exact) {
  const float nearest = static_cast<float>(exact);
  return static_cast<double>(nearest) > exact ? std::nextafterf(nearest, -INFINITY) : nearest;
}
inline float fma_down(float a, float b, float c) {
  return rounded_down(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}
inline float add_towards_zero(float a, float b) {
  return ::emulator::truncated(static_cast<double>(a) + static_cast<double>(b));
}
inline std::uint16_t to_float16(float value) { return __float2half_rn(value).bits; }
inline std::uint16_t to_bfloat16(float value) { return __float2bfloat16_rn(value).bits; }

// ---- memory ----------------------------------------------------------------------------------------------------------
inline std::uint32_t dynamic_offset() { return Watch::instance().dynamic_offset(); }

template <class V>
V load_param(std::uint64_t address) {
  V out;
  std::memcpy(&out, reinterpret_cast<const void*>(address), sizeof out);
  return out;
}
template <class V>
V load_global(int site, std::uint64_t address) {
  Watch::instance().global_access(site, address, sizeof(V));
  return load_param<V>(address);
}
template <class V>
void store_global(int site, std::uint64_t address, const V& value) {
  Watch::instance().global_access(site, address, sizeof(V));
  std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
}
template <class V>
V load_shared(int site, std::uint32_t address) {
  Watch::instance().shared_access(site, address, sizeof(V), false);
  V out;
  std::memcpy(&out, ::emulator::shared_at(address), sizeof out);
  return out;
}
template <class V>
void store_shared(int site, std::uint32_t address, const V& value) {
  Watch::instance().shared_access(site, address, sizeof(V), true);
  std::memcpy(::emulator::shared_at(address), &value, sizeof value);
}

inline void copy_async(int site, std::uint32_t target, std::uint64_t source, int target_bytes, std::uint32_t bytes) {
  Watch::instance().copy_begins(site, target, source, static_cast<int>(bytes), target_bytes);
  ::emulator::Scheduler::instance().copy_async(::emulator::shared_at(target), reinterpret_cast<const void*>(source), bytes,
                                               static_cast<std::size_t>(target_bytes));
}
inline void commit_copies() {
  Watch::instance().copies_committed();
  ::emulator::Scheduler::instance().commit_copies();
}
inline void wait_for_copies(int pending) {
  ::emulator::Scheduler::instance().wait_for_copies(static_cast<std::size_t>(pending));
  Watch::instance().copies_arrived(pending);
}

// ---- together --------------------------------------------------------------------------------------------------------
inline void barrier(const ::emulator::Site& site) {
  ::emulator::Scheduler::instance().block_barrier(site);
  Watch::instance().barrier_passed();
}
inline std::uint32_t shuffle_xor(const ::emulator::Site& site, std::uint32_t value, std::uint32_t lanes,
                                 std::uint32_t bound, std::uint32_t mask) {
  if (bound != 0x1fu) ::emulator::Scheduler::instance().fail("a shuffle inside of parts of a warp");
  return ::emulator::shuffle(site, "__shfl_xor_sync", mask, value, static_cast<int>(lanes));
}
inline void load_matrices(int site, std::uint32_t (&out)[4], std::uint32_t address, bool transposed) {
  Watch::instance().shared_access(site, address, 16, false);
  ::emulator::ldmatrix(out, address, transposed);
}
inline void multiply_float16(float (&sum)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  ::emulator::mma_16("mma.f16", sum, a, b, ::emulator::from_float16);
}
inline void multiply_bfloat16(float (&sum)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  ::emulator::mma_16("mma.bf16", sum, a, b, ::emulator::from_bfloat16);
}
inline void multiply_tf32(float (&sum)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  ::emulator::mma_tf32(sum, a, b);
}

}  // namespace ptx
