// The difference of two tensors of one shape, element by element, in one pass over both.
//
// Two pieces that fit the nearest cache are compared byte by byte.  If they differ, they are
// compared as numbers: whole numbers exactly, all others in double precision.  The result depends
// only on the elements and the CPU, not on the number of threads.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>

#include "core/pipeline/pipeline.h"
#include "core/statistics/statistics.h"

namespace ptsave {

// Numbers are close if |a - b| <= absolute + relative * |b|; NaN is close to NaN.
struct Tolerance {
  double relative = 0;
  double absolute = 0;

  bool allows(double distance, double size) const {
    return distance <= absolute + relative * (size < 0 ? -size : size);
  }
};

// Buckets of units in the last place: 0, 1, 2, up to 4, up to 8, ..., up to 2^63.  The last bucket
// counts pairs with different signs, and pairs of a number and NaN or infinity.
inline constexpr std::size_t kNUlpBuckets = 66;
inline constexpr std::size_t kNoUlps = kNUlpBuckets - 1;

// Sums over the pairs of finite numbers.  The numbers of a are first divided by 2^scale_a and those
// of b by 2^scale_b, because squares of doubles may become infinite or zero.
struct Products {
  double product = 0;
  double squares_a = 0;
  double squares_b = 0;
  int scale_a = 0;
  int scale_b = 0;
};

// The exact distance of two whole numbers, which has up to 65 bits.
struct WholeDistance {
  bool overflows = false;  // the distance is 2^64 + low
  std::uint64_t low = 0;
  auto operator<=>(const WholeDistance&) const = default;
};

struct Difference {
  std::uint64_t n = 0;  // elements on each side
  // Elements that differ in their bits or, between two formats, in their values.
  std::uint64_t n_different = 0;
  std::uint64_t first_different = 0;  // the first one's index; n if none differs
  std::uint64_t n_outside = 0;        // outside the tolerance
  // A complex element with NaN and infinity counts as NaN.
  std::uint64_t n_nan_a = 0;
  std::uint64_t n_nan_b = 0;
  std::uint64_t n_inf_a = 0;
  std::uint64_t n_inf_b = 0;
  // NaN on this side only.
  std::uint64_t n_nan_only_a = 0;
  std::uint64_t n_nan_only_b = 0;
  // Unequal pairs with an infinity and without NaN.
  std::uint64_t n_inf_mismatch = 0;
  // Maxima over pairs without NaN.  Both are infinite if an infinity is compared with another
  // number; max_rel is infinite if a nonzero number is compared with zero.
  double max_abs = 0;
  double max_rel = 0;
  WholeDistance max_abs_integer;  // of whole numbers
  Products products;
  // Counts of pairs by their distance in units in the last place of the coarser format, to which
  // both numbers are rounded.  For whole numbers the unit is 1; for complex numbers the larger
  // part's distance counts.
  std::array<std::uint64_t, kNUlpBuckets> ulps{};
};

// Compares `n` elements of each side, aligned or not, by up to `n_threads` threads.  Calls `poll`
// while waiting for threads.  Throws std::invalid_argument if only one side is float4, which has
// two numbers in an element.
Difference difference_of(Element element_a, const void* a, Element element_b, const void* b,
                         std::size_t n, const Tolerance& tolerance = {}, std::size_t n_threads = 1,
                         const Poll& poll = {});

}  // namespace ptsave
