// One function for each instruction that CUDA C++ has no name for. The emulator defines the same functions.
#pragma once

#if defined(FASTCSSL_EMULATOR)

#include "tensor_core.h"

#else

namespace fastcssl::infonce::gpu {

// ---- asynchronous copies, global to shared --------------------------------------------------------------------------

// Copies 16 bytes, or writes 16 zeros without reading `source`.
__device__ inline void copy_async(unsigned target, const void* source, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(inside ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until this thread's copies have arrived, except for the last kPending groups. Other threads see them after a
// barrier.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- four 8 x 8 matrices of 16 bits; lane i has the address of row i % 8 of matrix i / 8 ----------------------------

// Lane i gets columns 2 (i % 4) and 2 (i % 4) + 1 of row i / 4.
__device__ inline void load_matrices(unsigned (&out)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}
// Lane i gets rows 2 (i % 4) and 2 (i % 4) + 1 of column i / 4.
__device__ inline void load_matrices_transposed(unsigned (&out)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// ---- sum += a b, 16 x 8 outputs; float32 sums -----------------------------------------------------------------------

#define FASTCSSL_MULTIPLY(name, instruction)                                                     \
  __device__ inline void name(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { \
    asm(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                     \
  }
FASTCSSL_MULTIPLY(multiply_float16, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
FASTCSSL_MULTIPLY(multiply_bfloat16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
FASTCSSL_MULTIPLY(multiply_tf32, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
#undef FASTCSSL_MULTIPLY

// Reads threadIdx.x again, so that the compiler recomputes values that depend on it instead of keeping them in
// registers that the sums need.
__device__ inline int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  __builtin_assume(thread >= 0);
  return thread;
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// Rounds to the nearest TF32 number. Otherwise the tensor core would cut off the last 13 bits.
__device__ inline unsigned round_to_tf32(float value) {
  unsigned out;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(value));
  return out;
}

// Returns 2^x from the special function unit, to two units in the last place, and 0 for -inf.
__device__ inline float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace fastcssl::infonce::gpu

#endif
