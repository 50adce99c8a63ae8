// Loops over a few thousand numbers, which fit the nearest cache, compiled for each kind of CPU:
// moments of numbers, and distances between pairs.  Internal to this room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/statistics/difference.h"

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

template <typename Number, typename Kernel>
const auto& loops_of(const Kernel& kernel) {
  if constexpr (std::is_same_v<Number, float>) {
    return kernel.floats;
  } else {
    return kernel.doubles;
  }
}

// An unsigned integer as wide as the number, and the bits of infinity.
template <typename Number>
using BitsOf = std::conditional_t<std::is_same_v<Number, float>, std::uint32_t, std::uint64_t>;
template <typename Number>
inline constexpr BitsOf<Number> kInfinityBits =
    static_cast<BitsOf<Number>>(sizeof(Number) == 4 ? 0x7F80'0000 : 0x7FF0'0000'0000'0000);

inline constexpr std::size_t kBlockLength = 4096;

struct Moments {
  std::size_t n_zero = 0;
  double mean = 0;
  double squares = 0;
  double min = 0;
  double max = 0;
};

struct NonFinite {
  std::size_t n_nan = 0;
  std::size_t n_inf = 0;
};

template <typename Number>
struct MomentsLoops {
  // Takes at least one number, all finite.
  Moments (*moments)(const Number* data, std::size_t n);
  NonFinite (*non_finite)(const Number* data, std::size_t n);
};

// The loops, compiled for each kind of CPU.
struct MomentsKernel {
  const char* name;
  bool (*supported)();
  MomentsLoops<float> floats;
  MomentsLoops<double> doubles;
  void (*from_half)(const std::uint16_t* data, std::size_t n, float* result);
};

extern const MomentsKernel kMomentsKernels[];
extern const std::size_t kNMomentsKernels;

const MomentsKernel& moments_kernel();
template <typename Number>
const MomentsLoops<Number>& moments_loops() {
  return loops_of<Number>(moments_kernel());
}

inline constexpr std::size_t kPairsLength = 2048;

// The numbers of a floating-point format, as if its exponent had no upper bound.  Each number has a
// position, counted from 0, and a difference of positions is in units in the last place.  A normal
// number's position is the bits of a float, shifted so that one step is one number of the grid.
// Smaller numbers are equally far apart, and their position is the number divided by that distance.
struct Grid {
  int mantissa_nbits = 0;
  int min_exponent = 0;  // of normal numbers
};

struct Distances {
  std::size_t n_outside = 0;
  double max_abs = 0;
  double product = 0;
  double squares_a = 0;
  double squares_b = 0;
  bool has_larger_ratio = false;
};

// Counts of pairs, found by their bits.
struct PairKinds {
  std::size_t n_different = 0;   // in value, if all are finite
  std::size_t n_not_finite = 0;  // on one side or both
};

template <typename Number>
struct DistancesLoops {
  // Takes only finite numbers.  Checks for a pair whose distance exceeds `ratio` times its second
  // number, because a multiplication takes less time than largest_ratio's division.
  Distances (*distances)(const Number* a, const Number* b, std::size_t n,
                         const Tolerance& tolerance, double ratio);
  double (*largest_ratio)(const Number* a, const Number* b, std::size_t n);
  double (*squares)(const Number* data, std::size_t n);
  // Finds each pair's index in Difference::ulps.
  void (*ulps)(const Number* a, const Number* b, std::size_t n, Grid grid, std::uint8_t* result);
  // The same for whole numbers.
  void (*ulps_of_integers)(const Number* a, const Number* b, std::size_t n, std::uint8_t* result);
  PairKinds (*kinds)(const Number* a, const Number* b, std::size_t n);
};

// The loops, compiled for each kind of CPU.
struct DistancesKernel {
  const char* name;
  bool (*supported)();
  DistancesLoops<float> floats;
  DistancesLoops<double> doubles;
  // Adds the count of each index to `counts`.
  void (*count_ulps)(const std::uint8_t* ulps, std::size_t n, std::uint64_t* counts);
};

extern const DistancesKernel kDistancesKernels[];
extern const std::size_t kNDistancesKernels;

const DistancesKernel& distances_kernel();
template <typename Number>
const DistancesLoops<Number>& distances_loops() {
  return loops_of<Number>(distances_kernel());
}

}  // namespace ptsave::statistics_internal
