// Statistics of the elements of a tensor, and the CRC-32 of their bytes, in one pass over memory.
//
// A piece of 32 KiB is checksummed and then looked at while the nearest cache holds it.  Its mean
// and its sum of squared deviations are taken in two passes over that cache, in double precision,
// and pieces are merged by Chan's formulas ("Updating formulae and a pairwise algorithm for
// computing sample variances", 1979): nothing large is ever subtracted from something large, so a
// mean of 1e6 beside a deviation of 1e-3 loses no digits.  The result depends on the elements and
// the CPU alone, not on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ptsave {

enum class Element {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kComplex128,
  kComplex64,
  kComplex32,
  kInt64,
  kUInt64,
  kInt32,
  kUInt32,
  kInt16,
  kUInt16,
  // One byte each, but for the last.
  kInt8,
  kUInt8,
  kBool,
  kFloat8E4M3,
  kFloat8E4M3Uz,
  kFloat8E5M2,
  kFloat8E5M2Uz,
  kFloat8E8M0,
  kFloat4E2M1Pair,
};

std::size_t nbytes_of(Element element);

// All of it, but for the counts and the checksum, is of the finite elements.
struct Statistics {
  std::uint64_t n = 0;  // of all elements
  std::uint64_t n_nan = 0;
  std::uint64_t n_inf = 0;
  std::uint64_t n_zero = 0;
  double mean = 0;
  double imaginary_mean = 0;  // of complex elements
  double squares = 0;         // the sum of squared distances from the mean, divided by 4^scale,
  int scale = 0;              // which is 0 unless squares of doubles would be infinite or zero
  // Without finite elements: infinity, and its negative.  Of complex elements: absolute values.
  double min = 0;
  double max = 0;
  // Of 64-bit integers, which a double does not hold: exact.  Those of unsigned ones have their
  // highest bit inverted, so that they order as signed ones.
  std::int64_t min_integer = 0;
  std::int64_t max_integer = 0;
  std::uint32_t crc = 0;

  std::uint64_t n_finite() const { return n - n_nan - n_inf; }
  // The square root of the unbiased variance; NaN for fewer than two finite elements.
  double standard_deviation() const;
  double norm() const;
};

// Of `nbytes` bytes of elements, which may be anywhere in memory, aligned or not.
Statistics statistics_of(Element element, const void* data, std::size_t nbytes);

// The same, chunk by chunk, with a copy of the bytes beside it: a chunk is copied past the cache,
// and looked at while the cache has it.  Chunks are merged in their order, so the result is that of
// statistics_of(), bit for bit, whoever took which.
class ChunkedStatistics {
 public:
  // `copy` gets the bytes; null for none.
  ChunkedStatistics(Element element, const std::byte* data, std::size_t nbytes,
                    std::byte* copy = nullptr);

  std::size_t n_chunks() const { return parts_.size(); }
  // Each chunk once.  Safe for concurrent use, for different chunks.
  void take(std::size_t chunk);
  // Once all chunks are taken.
  Statistics result() const;

 private:
  std::size_t length_of(std::size_t chunk) const;

  const Element element_;
  const std::byte* const data_;
  const std::size_t nbytes_;
  std::byte* const copy_;
  std::vector<Statistics> parts_;
};

}  // namespace ptsave
