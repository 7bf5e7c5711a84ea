// InfoNCE and the rings on the CPU. infonce.h says what is computed; infonce_kernel.h how.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "infonce/infonce.h"

namespace fastcssl::infonce {

// Calls a function with 0, 1, ..., count - 1, in any order, several at a time.
using Parallel = std::function<void(int count, const std::function<void(int)>& work)>;

// The banks are divided into parts by `num_threads`, and their results are added in order: a number of threads always
// gives the same bits.
void infonce_cpu(const Rows& rows, const Bank* banks, int num_banks, const Result& result, int num_threads,
                 const Parallel& parallel);
void enqueue_cpu(const Ring* rings, int num_rings, int dim);

// "avx512", "avx2" or "portable": what infonce_cpu uses here; `force` (or nullptr) overrides it, for tests.
const char* infonce_isa();
bool infonce_force_isa(const char* name);

// ---- Between infonce_cpu.cpp and the kernels, one for each instruction set.

// Keys at a time. Their softmax against a panel of rows stays in the first cache; it divides by every number of keys
// or of dimensions that a kernel holds in registers.
constexpr int kTileKeys = 120;

struct Span {  // of a bank
  const void* keys_KD;
  Type type;
  std::int64_t first;  // its row in the bank
  std::int64_t count;
};

// Rows that are swept together: `width` vectors of one instruction set's lanes.
struct Panel {
  std::int64_t first_row;
  int width;
};

// One part of the banks against all rows. Arrays of rows lie panel after panel, each [D, rows of the panel] or [rows of
// the panel], so that a vector holds as many rows.
struct Sweep {
  const Panel* panels;
  int num_panels;
  int dim;
  const float* queries;     // scaled
  const std::int64_t* own;  // or null; padded with -1
  std::vector<Span> spans;
  // What is found: sums of 2^(s log2(e) - shift), and of the keys so weighted.
  float* shift;  // -inf for a row that saw no key
  float* total;
  float* weighted;  // or null, if not wanted
  // For the kernel to use.
  float* limit;    // of logits: beyond it the shift is raised
  float* softmax;  // [kTileKeys, rows of a panel]
  float* widened;  // [kTileKeys, D], for keys that are stored in half precision
};

using Kernel = void (*)(const Sweep&);

void sweep_avx512(const Sweep& sweep);
void sweep_avx2(const Sweep& sweep);
void sweep_portable(const Sweep& sweep);

// How wide the kernels' vectors are, and how many of them make the widest panel.
constexpr int kLanesAvx512 = 16, kWideAvx512 = 3;
constexpr int kLanesAvx2 = 8, kWideAvx2 = 3;
constexpr int kLanesPortable = 4, kWidePortable = 2;

}  // namespace fastcssl::infonce
