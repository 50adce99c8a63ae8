// The difference of two tensors of one shape, element by element, in one pass over both.
//
// Two pieces that the nearest cache holds are compared byte by byte and, where that shows a
// difference, as numbers: whole numbers exactly, all others in double precision.  The result
// depends on the elements and the CPU alone, not on the number of threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/pipeline/pipeline.h"
#include "core/statistics/statistics.h"

namespace ptsave {

// Numbers are near each other if |a - b| <= absolute + relative * |b|; a NaN is near any NaN.
struct Tolerance {
  double relative = 0;
  double absolute = 0;

  bool allows(double distance, double size) const {
    return distance <= absolute + relative * (size < 0 ? -size : size);
  }
};

// Of units in the last place: 0, 1, 2, up to 4, up to 8, ..., up to 2^63; and other signs, or no
// number on one side.
inline constexpr std::size_t kNUlpBuckets = 66;
inline constexpr std::size_t kNoUlps = kNUlpBuckets - 1;

// Sums over the pairs whose numbers both are finite.  Those of a are divided by 2^scale_a before,
// those of b by 2^scale_b, or squares of doubles would be infinite or zero.
struct Products {
  double product = 0;
  double squares_a = 0;
  double squares_b = 0;
  int scale_a = 0;
  int scale_b = 0;
};

struct Difference {
  std::uint64_t n = 0;  // of elements of each side
  // With other bits; of two formats, with another value.
  std::uint64_t n_different = 0;
  std::uint64_t first_different = 0;  // the index of the first of them; n if there is none
  std::uint64_t n_outside = 0;        // the tolerance
  // Of complex elements that have both, NaN counts.
  std::uint64_t n_nan_a = 0;
  std::uint64_t n_nan_b = 0;
  std::uint64_t n_inf_a = 0;
  std::uint64_t n_inf_b = 0;
  // On one side alone.
  std::uint64_t n_nan_only_a = 0;
  std::uint64_t n_nan_only_b = 0;
  // Where at least one is infinite, none is NaN, and they are not the same.
  std::uint64_t n_inf_mismatch = 0;
  // Of pairs without NaN.  Infinite if an infinity meets anything else, and the relative one if
  // the second number is zero and the first is not.
  double max_abs = 0;
  double max_rel = 0;
  // The largest distance of whole numbers, exactly; the largest of these if it needs more bits.
  std::uint64_t max_abs_integer = 0;
  Products products;
  // Counts of pairs, by their distance in the coarser of the two formats, to which both are
  // rounded; of whole numbers it is the distance, of complex ones the larger of both parts.
  std::array<std::uint64_t, kNUlpBuckets> ulps{};
};

// Of `n` elements of each side, which may be anywhere in memory, aligned or not, by up to
// `n_threads` threads.  `poll` is called on this thread if it waits for others.  Throws
// std::invalid_argument for pairs of float4 and another format: one has two numbers in an element.
Difference difference_of(Element element_a, const void* a, Element element_b, const void* b,
                         std::size_t n, const Tolerance& tolerance = {}, std::size_t n_threads = 1,
                         const Poll& poll = {});

}  // namespace ptsave
