// Statistics of the elements of a tensor, and the CRC-32 of their bytes, in one pass over memory.
//
// A piece of 32 KiB is checksummed and then examined while the nearest cache holds it.  Two passes
// over it compute its mean and its sum of squared deviations, in double precision.  Pieces are
// merged by Chan's formulas ("Updating formulae and a pairwise algorithm for computing sample
// variances", 1979).  They never subtract large numbers from each other, so a mean of 1e6 beside a
// deviation of 1e-3 loses no digits.  The result depends only on the elements and the CPU, not on
// the number of threads.
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
  // One byte per element; two numbers in a byte for the last.
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

// Statistics of the finite elements, except the counts and the checksum.
struct Statistics {
  std::uint64_t n = 0;  // all elements
  std::uint64_t n_nan = 0;
  std::uint64_t n_inf = 0;
  std::uint64_t n_zero = 0;
  double mean = 0;
  double imaginary_mean = 0;  // of complex elements
  double squares = 0;         // the sum of squared distances from the mean, divided by 4^scale,
  int scale = 0;              // which is 0 unless squares of doubles would be infinite or zero
  // The extremes of the elements, or of absolute values if the elements are complex.  Infinity and
  // minus infinity if no element is finite.
  double min = 0;
  double max = 0;
  // The exact minimum and maximum of 64-bit integers, which a double cannot hold.  Unsigned ones
  // have their highest bit inverted, so that they compare like signed ones.
  std::int64_t min_integer = 0;
  std::int64_t max_integer = 0;
  std::uint32_t crc = 0;

  std::uint64_t n_finite() const { return n - n_nan - n_inf; }
  // The square root of the unbiased variance; NaN for fewer than two finite elements.
  double standard_deviation() const;
  double norm() const;
};

// The statistics of `nbytes` bytes of elements, aligned or not.
Statistics statistics_of(Element element, const void* data, std::size_t nbytes);

// The same, chunk by chunk, while copying the bytes: each chunk is copied past the cache, and
// examined while the cache holds it.  Chunks are merged in order, so the result equals that of
// statistics_of() bit for bit, whichever threads take them.
class ChunkedStatistics {
 public:
  // `copy` receives the bytes; null for no copy.
  ChunkedStatistics(Element element, const std::byte* data, std::size_t nbytes,
                    std::byte* copy = nullptr);

  std::size_t n_chunks() const { return parts_.size(); }
  // Call once for each chunk; safe for concurrent use with different chunks.
  void take(std::size_t chunk);
  // Call when all chunks have been taken.
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
