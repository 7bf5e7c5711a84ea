// InfoNCE of M rows against banks of keys, and the ring buffers that store the banks. Plain pointers: no torch header.
//
// There are M rows of width D, and a bank has K rows. Row i has a logit s_ij = scaled_i . key_j for each key that it
// sees (queries are already divided by the temperature) and s_i = scaled_i . positive_i. With l_i = log sum_j exp s_ij
// and mean_i = sum_j softmax_j(s_ij) key_j,
//
//                            positive in the denominator    not in the denominator
//     loss_i                 log(1 + exp(l_i - s_i))        l_i - s_i
//     d loss_i / d scaled_i  w_i (mean_i - positive_i)
//     d loss_i / d positive_i  -w_i scaled_i
//     w_i                    sigmoid(l_i - s_i)             1
//
// A row that sees no key has loss 0 and no gradient. Sums are in float32, whatever type the banks have.
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
  const std::int64_t* filled;  // rows from *filled on are hidden; null: all rows count. It is on the bank's device.
};

struct Rows {
  const float* scaled_MD;     // contiguous
  const float* positive_MD;   // contiguous
  const std::int64_t* own_M;  // row i does not see row own_M[i] of any bank; null: it sees all
  std::int64_t num_rows;      // M
  int dim;                    // D
  bool positive_in_denominator;
};

struct Result {
  float* loss_M;
  float* by_scaled_MD;    // or null if it is not wanted
  float* by_positive_MD;  // or null
};

// A bank to write to. Keys go to rows *pointer, *pointer + 1, ..., and continue at row 0 after the last row. If there
// are more keys than rows, the last keys stay. Then *pointer and *filled are updated.
struct Ring {
  void* rows_KD;
  std::int64_t num_rows;
  Type type;
  std::int64_t* pointer;  // on the ring's device, like `filled`
  std::int64_t* filled;
  const float* keys_GD;   // contiguous
  std::int64_t num_keys;  // G
  bool normalise;         // scale keys to unit length before they are rounded to `type`
};

// How tensor cores multiply float32 numbers: each operand is one TF32 number, or the sum of two (three products).
enum class Precision { tf32, tf32x3 };

// ---- CUDA (infonce_cuda.cu). All pointers are on the current device. Nothing waits for the device. A bank that the
// sweep reads must begin at a multiple of 16 bytes, as newly allocated tensors do; otherwise the error is
// cudaErrorMisalignedAddress.

// Returns whether the kernels support a width: multiples of 8 up to 256.
bool infonce_cuda_takes(int dim);
std::size_t infonce_cuda_workspace_bytes(const Rows& rows, const Bank* banks, int num_banks, Precision precision);
device::Failure infonce_cuda(const Rows& rows, const Bank* banks, int num_banks, Precision precision,
                             const Result& result, void* workspace, void* stream);
// Call this after the sweep, on the same stream: the sweep must read the rows before they are overwritten.
device::Failure enqueue_cuda(const Ring* rings, int num_rings, int dim, void* stream);

}  // namespace fastcssl::infonce
