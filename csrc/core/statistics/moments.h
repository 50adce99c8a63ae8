// Moments of a few thousand numbers, which fit the nearest cache.  Internal to statistics.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptsave::statistics_internal {

// The maximum length of a block.
inline constexpr std::size_t kBlockLength = 4096;

struct Moments {
  std::size_t n_zero = 0;
  double mean = 0;
  double squares = 0;
  double min = 0;
  double max = 0;
};

// Counts of NaN and of infinities.
struct NonFinite {
  std::size_t n_nan = 0;
  std::size_t n_inf = 0;
};

// The loops over a block, compiled for each kind of CPU.
struct MomentsKernel {
  const char* name;
  bool (*supported)();
  // Take at least one number, all finite.
  Moments (*of_floats)(const float* data, std::size_t n);
  Moments (*of_doubles)(const double* data, std::size_t n);
  NonFinite (*non_finite_floats)(const float* data, std::size_t n);
  NonFinite (*non_finite_doubles)(const double* data, std::size_t n);
  void (*from_half)(const std::uint16_t* data, std::size_t n, float* result);
};

extern const MomentsKernel kMomentsKernels[];
extern const std::size_t kNMomentsKernels;

const MomentsKernel& moments_kernel();

}  // namespace ptsave::statistics_internal
