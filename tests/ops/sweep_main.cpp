// The CPU kernels of infonce/ under sanitizers: ragged shapes, every instruction set, arrays of exactly their size.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "infonce/infonce_cpu.h"

using namespace fastcssl::infonce;

namespace {

void in_threads(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

float drawn(std::uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
}

int bad(const char* what, const char* isa, int rows, int dim) {
  std::fprintf(stderr, "%s: %s, %d rows of %d\n", what, isa, rows, dim);
  return 1;
}

int sweep_all(const char* isa) {
  const int sizes[][2] = {{1, 1}, {7, 3}, {16, 5}, {17, 8}, {49, 13}, {80, 24}};
  std::uint32_t state = 1;
  for (const auto& [rows, dim] : sizes) {
    for (const Type type : {Type::float32, Type::float16, Type::bfloat16}) {
      std::vector<float> scaled(rows * dim), positive(rows * dim);
      std::vector<float> loss(rows), by_scaled(rows * dim), by_positive(rows * dim);
      for (float& x : scaled) x = 30 * drawn(state);
      for (float& x : positive) x = drawn(state);
      std::vector<std::int64_t> own(rows);
      for (int i = 0; i < rows; ++i) own[i] = 3 * i - 1;
      const std::int64_t keys = 131, other = 2, filled = 129;
      // The smallest whole arrays; half numbers are drawn as bits of small exponent.
      std::vector<float> wide(keys * dim), second(other * dim);
      std::vector<std::uint16_t> narrow(keys * dim);
      for (float& x : wide) x = drawn(state);
      for (float& x : second) x = drawn(state);
      for (std::uint16_t& x : narrow) x = static_cast<std::uint16_t>(0x3000 + (drawn(state) + 1) * 100);
      const void* rows_KD = type == Type::float32 ? static_cast<const void*>(wide.data()) : narrow.data();
      const Bank banks[] = {{rows_KD, keys, type, &filled}, {second.data(), other, Type::float32, nullptr}};
      const Rows input{scaled.data(), positive.data(), own.data(), rows, dim, rows % 2 == 0};
      infonce_cpu(input, banks, 2, {loss.data(), by_scaled.data(), by_positive.data()}, 3, in_threads);
      for (const float x : loss) {
        if (!std::isfinite(x)) return bad("a loss is not finite", isa, rows, dim);
      }
      infonce_cpu(input, banks, 1, {loss.data(), nullptr, nullptr}, 1, in_threads);
    }
  }
  return 0;
}

int enqueue_all() {
  for (const Type type : {Type::float32, Type::float16, Type::bfloat16}) {
    const int dim = 3;
    std::vector<float> keys(11 * dim, 0.5f);
    for (int i = 0; i < dim; ++i) keys[i] = 0.0f;
    for (const std::int64_t size : {1, 4, 11, 13}) {
      std::vector<float> wide(size * dim);
      std::vector<std::uint16_t> narrow(size * dim);
      void* rows_KD = type == Type::float32 ? static_cast<void*>(wide.data()) : narrow.data();
      std::int64_t pointer = size - 1, filled = 0;
      const Ring ring{rows_KD, size, type, &pointer, &filled, keys.data(), 11, true};
      enqueue_cpu(&ring, 1, dim);
      enqueue_cpu(&ring, 1, dim);
      if (pointer != (size - 1 + 22) % size || filled != size) return bad("a ring is wrong", "enqueue", int(size), dim);
    }
  }
  return 0;
}

}  // namespace

int main() {
  int paths = 0;
  for (const char* isa : {"avx512", "avx2", "portable"}) {
    if (!infonce_force_isa(isa)) continue;
    ++paths;
    if (const int status = sweep_all(isa)) return status;
  }
  if (const int status = enqueue_all()) return status;
  std::printf("%d kinds of sweeps\n", paths);
  return 0;
}
