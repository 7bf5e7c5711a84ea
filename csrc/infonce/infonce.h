// InfoNCE of M rows against banks of keys, and the rings that the banks are. Plain pointers: no torch header.
//
// M rows, D width, K rows of a bank. Row i has the logit s_ij = scaled_i . key_j for each key it may see (its queries are
// divided by the temperature before they come here) and s_i = scaled_i . positive_i. With l_i = log sum_j exp s_ij and
// mean_i = sum_j softmax_j(s_ij) key_j,
//
//                            positive in the denominator    not in it
//     loss_i                 log(1 + exp(l_i - s_i))        l_i - s_i
//     d loss_i / d scaled_i  w_i (mean_i - positive_i)
//     d loss_i / d positive_i  -w_i scaled_i
//     w_i                    sigmoid(l_i - s_i)             1
//
// A row that sees no key has loss 0 and no gradient. Sums are kept in float32, whatever the banks store.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../device/failure.h"

namespace fastcssl::infonce {

enum class Type { float32, float16, bfloat16 };

struct Bank {
  const void* rows_KD;         // contiguous
  std::int64_t num_rows;       // K
  Type type;                   // how the rows are stored
  const std::int64_t* filled;  // rows from *filled on are hidden; null: all rows count. On the banks' own device.
};

struct Rows {
  const float* scaled_MD;     // contiguous
  const float* positive_MD;   // contiguous
  const std::int64_t* own_M;  // row i does not see row own_M[i] of any bank; null: sees all
  std::int64_t num_rows;      // M
  int dim;                    // D
  bool positive_in_denominator;
};

struct Result {
  float* loss_M;
  float* by_scaled_MD;    // or null, if not wanted
  float* by_positive_MD;  // or null
};

// A bank as what is written: keys go to rows *pointer, *pointer + 1, ..., around the end; of more keys than rows the last
// ones stay. Then *pointer and *filled move on.
struct Ring {
  void* rows_KD;
  std::int64_t num_rows;
  Type type;
  std::int64_t* pointer;  // on the ring's own device, as is `filled`
  std::int64_t* filled;
  const float* keys_GD;   // contiguous
  std::int64_t num_keys;  // G
  bool normalise;         // to unit length, before they are rounded to `type`
};

// float32 products on tensor cores: each operand as one TF32 number, or as the sum of two (three products).
enum class Precision { tf32, tf32x3 };

// ---- CUDA (infonce_cuda.cu). All pointers are of the current device; nothing waits for it. A bank that the
// sweep reads begins at a multiple of 16 bytes, as every tensor of its own does, or the error is
// cudaErrorMisalignedAddress.

// Widths that the kernels take: multiples of 8 up to 256.
bool infonce_cuda_takes(int dim);
std::size_t infonce_cuda_workspace_bytes(const Rows& rows, const Bank* banks, int num_banks, Precision precision);
device::Failure infonce_cuda(const Rows& rows, const Bank* banks, int num_banks, Precision precision,
                             const Result& result, void* workspace, void* stream);
// After the sweep on the same stream: the sweep has read the old rows.
device::Failure enqueue_cuda(const Ring* rings, int num_rings, int dim, void* stream);

}  // namespace fastcssl::infonce
