// Runs infonce_cuda and enqueue_cuda under the emulator on one problem: standard input to standard output, as the
// functions below read and write them (int64 and float32). Buffers have their exact size, for ASan.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "infonce/infonce.h"

namespace {

using namespace fastcssl::infonce;

constexpr std::align_val_t kAlignment{256};  // as cudaMalloc has it

struct Free {
  void operator()(unsigned char* memory) const { ::operator delete(memory, kAlignment); }
};

// Not a byte longer than asked for; NaN, where nothing is written.
struct Buffer {
  std::size_t bytes = 0;
  std::unique_ptr<unsigned char, Free> memory;

  explicit Buffer(std::size_t count)
      : bytes(count), memory(static_cast<unsigned char*>(::operator new(count, kAlignment))) {
    std::memset(memory.get(), 0xff, bytes);
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(memory.get());
  }
};

Buffer read_bytes(std::size_t count) {
  Buffer out(count);
  if (std::fread(out.memory.get(), 1, count, stdin) != count) {
    std::fprintf(stderr, "standard input is too short\n");
    std::exit(2);
  }
  return out;
}

std::int64_t read_number() {
  const Buffer buffer = read_bytes(sizeof(std::int64_t));
  return *buffer.as<std::int64_t>();
}

void write(const Buffer& buffer) { std::fwrite(buffer.memory.get(), 1, buffer.bytes, stdout); }

std::size_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

int report(const char* function, const fastcssl::device::Failure& failure) {
  if (failure) std::fprintf(stderr, "%s returned %d at %s\n", function, failure.error, failure.where);
  return failure ? 3 : 0;
}

// M, D, number of banks, precision, positive in the denominator, has own, wants by_scaled, by_positive; scaled, positive,
// own; of each bank: K, type, filled (-1: none), rows. Out: loss, by_scaled, by_positive.
int sweep(bool misaligned) {
  Rows rows{};
  rows.num_rows = read_number();
  rows.dim = static_cast<int>(read_number());
  const int num_banks = static_cast<int>(read_number());
  const Precision precision = static_cast<Precision>(read_number());
  rows.positive_in_denominator = read_number() != 0;
  const bool has_own = read_number() != 0, wants_scaled = read_number() != 0, wants_positive = read_number() != 0;
  const std::size_t num_rows = static_cast<std::size_t>(rows.num_rows), row_bytes = sizeof(float) * rows.dim;
  const Buffer scaled = read_bytes(num_rows * row_bytes), positive = read_bytes(num_rows * row_bytes);
  const Buffer own = read_bytes(has_own ? num_rows * sizeof(std::int64_t) : 0);
  rows.scaled_MD = scaled.as<float>();
  rows.positive_MD = positive.as<float>();
  if (has_own) rows.own_M = own.as<std::int64_t>();
  std::vector<Bank> banks;
  std::vector<Buffer> kept;
  for (int b = 0; b < num_banks; ++b) {
    Bank bank{};
    bank.num_rows = read_number();
    bank.type = static_cast<Type>(read_number());
    const std::int64_t filled = read_number();
    kept.push_back(read_bytes(static_cast<std::size_t>(bank.num_rows) * rows.dim * bytes_of(bank.type)));
    bank.rows_KD = kept.back().as<unsigned char>() + (misaligned ? 2 : 0);
    if (filled >= 0) {
      kept.emplace_back(sizeof filled);
      std::memcpy(kept.back().memory.get(), &filled, sizeof filled);
      bank.filled = kept.back().as<std::int64_t>();
    }
    banks.push_back(bank);
  }
  const Buffer loss(num_rows * sizeof(float)), by_scaled(wants_scaled ? num_rows * row_bytes : 0),
      by_positive(wants_positive ? num_rows * row_bytes : 0);
  const Result result{loss.as<float>(), wants_scaled ? by_scaled.as<float>() : nullptr,
                      wants_positive ? by_positive.as<float>() : nullptr};
  const Buffer workspace(infonce_cuda_workspace_bytes(rows, banks.data(), num_banks, precision));
  const fastcssl::device::Failure failure =
      infonce_cuda(rows, banks.data(), num_banks, precision, result, workspace.as<void>(), nullptr);
  if (!failure) {
    write(loss);
    write(by_scaled);
    write(by_positive);
  }
  return report("infonce_cuda", failure);
}

// D, number of rings; of each: K, type, normalise, pointer, filled, G, rows, keys. Out, of each: pointer, filled, rows.
int enqueue() {
  const int dim = static_cast<int>(read_number()), num_rings = static_cast<int>(read_number());
  std::vector<Ring> rings;
  std::vector<Buffer> kept;
  for (int r = 0; r < num_rings; ++r) {
    Ring ring{};
    ring.num_rows = read_number();
    ring.type = static_cast<Type>(read_number());
    ring.normalise = read_number() != 0;
    kept.push_back(read_bytes(sizeof(std::int64_t)));
    ring.pointer = kept.back().as<std::int64_t>();
    kept.push_back(read_bytes(sizeof(std::int64_t)));
    ring.filled = kept.back().as<std::int64_t>();
    ring.num_keys = read_number();
    kept.push_back(read_bytes(static_cast<std::size_t>(ring.num_rows) * dim * bytes_of(ring.type)));
    ring.rows_KD = kept.back().as<void>();
    kept.push_back(read_bytes(static_cast<std::size_t>(ring.num_keys) * dim * sizeof(float)));
    ring.keys_GD = kept.back().as<float>();
    rings.push_back(ring);
  }
  const fastcssl::device::Failure failure = enqueue_cuda(rings.data(), num_rings, dim, nullptr);
  for (std::size_t i = 0; !failure && i < kept.size(); ++i) {
    if (i % 4 != 3) write(kept[i]);
  }
  return report("enqueue_cuda", failure);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "sweep" || what == "sweep_misaligned") return sweep(what != "sweep");
  if (what == "enqueue") return enqueue();
  std::fprintf(stderr, "sweep or enqueue, not '%s'\n", what.c_str());
  return 2;
}
