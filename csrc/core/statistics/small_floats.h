// The values of formats of one byte or less.  Internal to statistics.cpp.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace ptsave::statistics_internal {

using ByteValues = std::array<double, 256>;

// The bit patterns of a small float that are no numbers.
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

}  // namespace ptsave::statistics_internal
