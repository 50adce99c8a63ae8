// The kinds of CPU for which the compiler vectorizes loops, and the best kind for this CPU.
// Internal to moments.cpp and distances.cpp.
#pragma once

#include <cstddef>

// Loops are inlined into functions with these features.
#define PTSAVE_INLINE __attribute__((always_inline)) inline

#define PTSAVE_AVX2 "avx2,fma"
#define PTSAVE_AVX512_FEATURES "avx512f,avx512vl,avx512bw,avx512dq,avx512cd," PTSAVE_AVX2
#if defined(__clang__)  // clang has no such option for a function
#define PTSAVE_AVX512 PTSAVE_AVX512_FEATURES
#else
#define PTSAVE_AVX512 PTSAVE_AVX512_FEATURES ",prefer-vector-width=512"
#endif

namespace ptsave::statistics_internal {

#if defined(__x86_64__)
inline bool avx2_supported() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}
inline bool avx512_supported() {
  return avx2_supported() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512cd") != 0;
}
#endif

// The last kernel that this CPU supports; the first is always supported.
template <typename Kernel>
const Kernel& best_of(const Kernel* kernels, std::size_t n) {
  std::size_t i = n - 1;
  while (!kernels[i].supported()) --i;
  return kernels[i];
}

}  // namespace ptsave::statistics_internal
