// InfoNCE and the rings on the CPU. infonce.h defines the result; infonce_kernel.h explains the computation.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "infonce/infonce.h"

namespace fastcssl::infonce {

// Calls a function with 0, 1, ..., count - 1, in any order and in parallel.
using Parallel = std::function<void(int count, const std::function<void(int)>& work)>;

// Divides the banks into parts depending on `num_threads` and adds their results in order. The same number of threads
// always gives the same bits.
void infonce_cpu(const Rows& rows, const Bank* banks, int num_banks, const Result& result, int num_threads,
                 const Parallel& parallel);
void enqueue_cpu(const Ring* rings, int num_rings, int dim);

// Returns the instruction set that infonce_cpu uses: "avx512", "avx2" or "portable". For tests, a name passed to
// infonce_force_isa overrides the choice, and nullptr undoes that.
const char* infonce_isa();
bool infonce_force_isa(const char* name);

// ---- The interface between infonce_cpu.cpp and the kernels. There is one kernel per instruction set.

// Keys per tile. Their softmax against a panel of rows stays in the first-level cache. The number is divisible by every
// number of keys or dimensions that a kernel holds in registers.
constexpr int kTileKeys = 120;

struct Span {  // consecutive rows of a bank
  const void* keys_KD;
  Type type;
  std::int64_t first;  // the first row in the bank
  std::int64_t count;
};

// Rows that are swept together: as many as `width` vectors have lanes.
struct Panel {
  std::int64_t first_row;
  int width;
};

// One part of the banks against all rows. Arrays of rows are stored panel by panel, each as [D, rows of the panel] or
// [rows of the panel], so that a vector holds one number for each of several rows.
struct Sweep {
  const Panel* panels;
  int num_panels;
  int dim;
  const float* queries;     // scaled
  const std::int64_t* own;  // or null; padded with -1
  std::vector<Span> spans;
  // Results: sums of 2^(s log2(e) - shift), and of the keys with these weights.
  float* shift;  // -inf for a row that saw no key
  float* total;
  float* weighted;  // or null if it is not wanted
  // Scratch memory of the kernel.
  float* limit;    // the limit of logits above which the shift is raised
  float* softmax;  // [kTileKeys, rows of a panel]
  float* widened;  // [kTileKeys, D], for keys stored in half precision
};

using Kernel = void (*)(const Sweep&);

void sweep_avx512(const Sweep& sweep);
void sweep_avx2(const Sweep& sweep);
void sweep_portable(const Sweep& sweep);

// The lanes of the kernels' vectors, and the number of vectors in the widest panel.
constexpr int kLanesAvx512 = 16, kWideAvx512 = 3;
constexpr int kLanesAvx2 = 8, kWideAvx2 = 3;
constexpr int kLanesPortable = 4, kWidePortable = 2;

}  // namespace fastcssl::infonce
