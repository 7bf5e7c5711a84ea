// The functions of csrc/infonce/infonce_instructions.cuh: asynchronous copies, ldmatrix and mma, lane by lane as the PTX
// manual lays them out. Worse than a GPU where a GPU may be worse: a copy's target is NaN from the first moment to its
// wait, TF32 operands lose their last 13 bits, sums are cut off after the 24th bit.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_emulator.h"

namespace emulator {

struct MmaOperands {
  std::uint32_t a[4], b[2];
};

inline float float_of(std::uint32_t bits) { return __uint_as_float(bits); }
inline float from_float16(std::uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<float>(value);
}
inline float from_bfloat16(std::uint16_t bits) { return float_of(std::uint32_t{bits} << 16); }
inline float from_tf32(std::uint32_t bits) { return float_of(bits & 0xffffe000u); }

// Towards zero, as tensor cores do.
inline float truncated(double value) {
  const float nearest = static_cast<float>(value);
  if (!std::isfinite(nearest) || std::fabs(static_cast<double>(nearest)) <= std::fabs(value)) return nearest;
  return std::nextafterf(nearest, 0.0f);
}

inline const MmaOperands* exchange_operands(const char* name, const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  MmaOperands mine;
  std::memcpy(mine.a, a, sizeof mine.a);
  std::memcpy(mine.b, b, sizeof mine.b);
  return reinterpret_cast<const MmaOperands*>(
      Scheduler::instance().exchange(name, 0xffffffffu, &mine, sizeof mine, Site{name, 0}));
}

// m16n8k16 with 16-bit operands.
template <class Decode>
void mma_16(const char* name, float (&sum)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], Decode decode) {
  const MmaOperands* all = exchange_operands(name, a, b);
  const int lane = Scheduler::instance().lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double total = sum[i];
    for (int k = 0; k < 16; ++k) {
      const std::uint32_t left = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      const std::uint32_t right = all[column * 4 + k % 8 / 2].b[k / 8];
      total += static_cast<double>(decode(static_cast<std::uint16_t>(left >> k % 2 * 16))) *
               static_cast<double>(decode(static_cast<std::uint16_t>(right >> k % 2 * 16)));
    }
    sum[i] = truncated(total);
  }
}

inline void mma_tf32(float (&sum)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  const MmaOperands* all = exchange_operands("mma.tf32", a, b);
  const int lane = Scheduler::instance().lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double total = sum[i];
    for (int k = 0; k < 8; ++k) {
      total += static_cast<double>(from_tf32(all[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2])) *
               static_cast<double>(from_tf32(all[column * 4 + k % 4].b[k / 4]));
    }
    sum[i] = truncated(total);
  }
}

// Shared addresses are offsets into the block's dynamic shared memory.
inline unsigned char* shared_at(std::uint32_t address) {
  return static_cast<unsigned char*>(Scheduler::instance().dynamic_shared()) + address;
}

inline void ldmatrix(std::uint32_t (&out)[4], std::uint32_t address, bool transposed) {
  Scheduler& scheduler = Scheduler::instance();
  if (address % 16 != 0) scheduler.fail("ldmatrix of address " + std::to_string(address) + ", not a multiple of 16");
  const unsigned char* brought = scheduler.exchange("ldmatrix", 0xffffffffu, &address, sizeof address, Site{"ldmatrix", 0});
  std::uint32_t rows[kWarpSize];
  std::memcpy(rows, brought, sizeof rows);
  const int lane = scheduler.lane();
  for (int m = 0; m < 4; ++m) {
    std::uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
      std::memcpy(&pair[i], shared_at(rows[m * 8 + row]) + column * 2, sizeof pair[i]);
    }
    out[m] = pair[0] | std::uint32_t{pair[1]} << 16;
  }
}

// To nearest, ties away from zero; infinities and NaN stay.
inline std::uint32_t to_tf32(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  return std::isfinite(value) ? (bits + 0x1000u) & 0xffffe000u : bits;
}

}  // namespace emulator

namespace fastcssl::infonce::gpu {

inline void copy_async(unsigned target, const void* source, bool inside) {
  ::emulator::Scheduler::instance().copy_async(::emulator::shared_at(target), source, inside ? 16 : 0, 16);
}
inline void commit_copies() { ::emulator::Scheduler::instance().commit_copies(); }
template <int kPending>
void wait_for_copies() {
  ::emulator::Scheduler::instance().wait_for_copies(kPending);
}
inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - ::emulator::shared_at(0));
}
inline void load_matrices(unsigned (&out)[4], unsigned address) { ::emulator::ldmatrix(out, address, false); }
inline void load_matrices_transposed(unsigned (&out)[4], unsigned address) { ::emulator::ldmatrix(out, address, true); }
inline void multiply_float16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  ::emulator::mma_16("mma.f16", sum, a, b, ::emulator::from_float16);
}
inline void multiply_bfloat16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  ::emulator::mma_16("mma.bf16", sum, a, b, ::emulator::from_bfloat16);
}
inline void multiply_tf32(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  ::emulator::mma_tf32(sum, a, b);
}
inline int fresh_thread() { return static_cast<int>(threadIdx.x); }
inline unsigned round_to_tf32(float value) { return ::emulator::to_tf32(value); }
inline float power_of_two(float x) { return std::exp2(x); }

}  // namespace fastcssl::infonce::gpu
