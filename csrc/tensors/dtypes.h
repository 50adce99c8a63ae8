// Facts about torch's dtypes.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/statistics/statistics.h"

namespace ptsave {

// The number of elements in a byte: 1, except for quantized types with smaller elements.
inline int elements_per_byte(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::QUInt4x2:
      return 2;
    case c10::ScalarType::QUInt2x4:
      return 4;
    default:
      return 1;
  }
}

// Returns nothing for a dtype whose elements are not numbers (quantized, bits).  Elements smaller
// than a byte (uint1 ... int7) count as bytes.
inline std::optional<Element> element_of(c10::ScalarType type) {
  using enum c10::ScalarType;
  using enum Element;
  if (type >= Int1 && type <= Int7) return kInt8;
  if (type >= UInt1 && type <= UInt7) return kUInt8;
  static constexpr std::pair<c10::ScalarType, Element> kElements[] = {
      {Float, kFloat32},
      {Half, kFloat16},
      {BFloat16, kBFloat16},
      {Double, kFloat64},
      {Long, kInt64},
      {Int, kInt32},
      {Short, kInt16},
      {Char, kInt8},
      {Byte, kUInt8},
      {Bool, kBool},
      {UInt64, kUInt64},
      {UInt32, kUInt32},
      {UInt16, kUInt16},
      {ComplexDouble, kComplex128},
      {ComplexFloat, kComplex64},
      {ComplexHalf, kComplex32},
      {Float8_e4m3fn, kFloat8E4M3},
      {Float8_e4m3fnuz, kFloat8E4M3Uz},
      {Float8_e5m2, kFloat8E5M2},
      {Float8_e5m2fnuz, kFloat8E5M2Uz},
      {Float8_e8m0fnu, kFloat8E8M0},
      {Float4_e2m1fn_x2, kFloat4E2M1Pair}};
  const auto* const found =
      std::ranges::find(kElements, type, &std::pair<c10::ScalarType, Element>::first);
  return found == std::end(kElements) ? std::nullopt : std::optional(found->second);
}

// Whether the host and every device convert all values alike.  False from fractional numbers to
// integers, because values that do not fit have no defined result.
inline bool convert_alike(c10::ScalarType from, c10::ScalarType to) {
  return from == to || c10::isIntegralType(from, /*includeBool=*/true) ||
         !c10::isIntegralType(to, /*includeBool=*/true);
}

}  // namespace ptsave
