// Distances between a few thousand pairs of numbers that the nearest cache holds.  Internal to
// difference.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/statistics/difference.h"

namespace ptsave::statistics_internal {

// Of a block of pairs, which is no longer than this.
inline constexpr std::size_t kPairsLength = 2048;

// The numbers of a floating-point format, as if its exponent had no upper bound.  Counted from 0
// they have positions, whose differences are units in the last place: the bits of a float, shifted
// so that one step is one number of the grid, and below the smallest normal number of the grid,
// where its numbers are equally far apart, a multiple of their distance.
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

// What pairs are like, by their bits.
struct PairKinds {
  std::size_t n_different = 0;   // with other values, if all are finite
  std::size_t n_not_finite = 0;  // on one side or both
};

// The loops over a block.  All of them are compiled once for each kind of CPU.
struct DistancesKernel {
  const char* name;
  bool (*supported)();
  // All numbers are finite.  Whether the distance of a pair is more than `ratio` of its second
  // number is found out here, for a multiplication takes less time than a division does.
  Distances (*of_floats)(const float* a, const float* b, std::size_t n, const Tolerance& tolerance,
                         double ratio);
  Distances (*of_doubles)(const double* a, const double* b, std::size_t n,
                          const Tolerance& tolerance, double ratio);
  double (*largest_ratio_of_floats)(const float* a, const float* b, std::size_t n);
  double (*largest_ratio_of_doubles)(const double* a, const double* b, std::size_t n);
  double (*squares_of_floats)(const float* data, std::size_t n);
  double (*squares_of_doubles)(const double* data, std::size_t n);
  // The index in Difference::ulps of each pair.
  void (*ulps_of_floats)(const float* a, const float* b, std::size_t n, Grid grid,
                         std::uint8_t* result);
  void (*ulps_of_doubles)(const double* a, const double* b, std::size_t n, Grid grid,
                          std::uint8_t* result);
  // The same of whole numbers.
  void (*ulps_of_integers_in_floats)(const float* a, const float* b, std::size_t n,
                                     std::uint8_t* result);
  void (*ulps_of_integers_in_doubles)(const double* a, const double* b, std::size_t n,
                                      std::uint8_t* result);
  // Adds how many there are of each.
  void (*count_ulps)(const std::uint8_t* ulps, std::size_t n, std::uint64_t* counts);
  PairKinds (*kinds_of_floats)(const float* a, const float* b, std::size_t n);
  PairKinds (*kinds_of_doubles)(const double* a, const double* b, std::size_t n);
};

extern const DistancesKernel kDistancesKernels[];
extern const std::size_t kNDistancesKernels;

const DistancesKernel& distances_kernel();

}  // namespace ptsave::statistics_internal
