// Converts a few thousand elements of any format and alignment into numbers for loops.  Internal to
// statistics.cpp and difference.cpp.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/statistics/kernels.h"
#include "core/statistics/statistics.h"

namespace ptsave::statistics_internal {

enum class Kind : std::uint8_t { kReal, kComplex, kInteger };

struct Format {
  std::uint8_t nbytes;  // of an element
  Kind kind;
  Grid grid;  // for whole numbers beside floats, the finest
};

const Format& format_of(Element element);

using ByteValues = std::array<double, 256>;

// The bit patterns of a small float format that mean infinity or NaN.
enum class Specials {
  kIeee,       // the largest exponent: infinity if the mantissa is 0, else NaN
  kLargest,    // the largest exponent and mantissa: NaN; no infinity
  kMinusZero,  // minus zero: NaN; no infinity
  kNone,
};

struct SmallFloat {
  int exponent_nbits;
  int mantissa_nbits;
  int bias;
  Specials specials;

  double operator()(unsigned bits) const {
    const unsigned mantissa = bits & ((1U << mantissa_nbits) - 1);
    const unsigned largest = (1U << exponent_nbits) - 1;
    const unsigned exponent = (bits >> mantissa_nbits) & largest;
    const bool negative = (bits >> (mantissa_nbits + exponent_nbits) & 1U) != 0;
    const bool all_ones = exponent == largest && mantissa == (1U << mantissa_nbits) - 1;
    const bool is_minus_zero = negative && exponent == 0 && mantissa == 0;
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    double value = 0;
    if (specials == Specials::kIeee && exponent == largest) {
      value = mantissa == 0 ? kInfinity : kNan;
    } else if ((specials == Specials::kLargest && all_ones) ||
               (specials == Specials::kMinusZero && is_minus_zero)) {
      value = kNan;
    } else if (exponent == 0) {
      value = std::ldexp(mantissa, 1 - bias - mantissa_nbits);
    } else {
      value = std::ldexp(mantissa + (1U << mantissa_nbits),
                         static_cast<int>(exponent) - bias - mantissa_nbits);
    }
    return negative ? -value : value;
  }
};

template <typename Function>
ByteValues tabulate(const Function& function) {
  ByteValues values{};
  for (unsigned byte = 0; byte < values.size(); ++byte) values[byte] = function(byte);
  return values;
}

const ByteValues& values_of(Element element);

inline constexpr SmallFloat kFloat4E2M1{2, 1, 1, Specials::kNone};

// Converts a block of at most kBlockLength elements.
template <typename From, typename To>
void convert(const std::byte* data, std::size_t n, To* result) {
  for (std::size_t i = 0; i < n; ++i) {
    From element;
    std::memcpy(&element, data + i * sizeof(From), sizeof(From));
    result[i] = static_cast<To>(element);
  }
}

struct Half {};
struct BFloat16 {};

template <>
inline void convert<Half, float>(const std::byte* data, std::size_t n, float* result) {
  std::array<std::uint16_t, kBlockLength> bits;
  std::memcpy(bits.data(), data, 2 * n);
  moments_kernel().from_half(bits.data(), n, result);
}

template <>
inline void convert<BFloat16, float>(const std::byte* data, std::size_t n, float* result) {
  for (std::size_t i = 0; i < n; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, data + 2 * i, 2);
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    std::memcpy(result + i, &wide, sizeof wide);
  }
}

// Reads `n` numbers, at most kBlockLength, into `result`; a float4 pair holds two.
void read(Element element, const std::byte* data, std::size_t n, float* result);
void read(Element element, const std::byte* data, std::size_t n, double* result);
// Reads the bits of unsigned 64-bit integers, and the values of all others.
void read(Element element, const std::byte* data, std::size_t n, std::int64_t* result);

}  // namespace ptsave::statistics_internal
