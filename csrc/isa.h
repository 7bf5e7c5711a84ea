// Tells which of the instruction sets that the kernels are compiled for this processor has.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fastcssl {

#if defined(__x86_64__)
// __builtin_cpu_supports of clang 14 does not know "f16c".
inline bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

inline bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#else
  return false;
#endif
}

inline bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_avx2();
#else
  return false;
#endif
}

}  // namespace fastcssl
