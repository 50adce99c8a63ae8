#include "core/statistics/elements.h"

#include <cmath>
#include <limits>

namespace ptsave::statistics_internal {

const ByteValues& values_of(Element element) {
  static const ByteValues kInt8 =
      tabulate([](unsigned byte) { return static_cast<double>(static_cast<std::int8_t>(byte)); });
  static const ByteValues kUint8 = tabulate([](unsigned byte) { return double{1} * byte; });
  static const ByteValues kBoolean = tabulate([](unsigned byte) { return byte != 0 ? 1.0 : 0.0; });
  static const ByteValues kE4M3 = tabulate(SmallFloat{4, 3, 7, Specials::kLargest});
  static const ByteValues kE4M3Uz = tabulate(SmallFloat{4, 3, 8, Specials::kMinusZero});
  static const ByteValues kE5M2 = tabulate(SmallFloat{5, 2, 15, Specials::kIeee});
  static const ByteValues kE5M2Uz = tabulate(SmallFloat{5, 2, 16, Specials::kMinusZero});
  static const ByteValues kE8M0 = tabulate([](unsigned byte) {
    return byte == 0xFF ? std::numeric_limits<double>::quiet_NaN()
                        : std::ldexp(1.0, static_cast<int>(byte) - 127);
  });
  switch (element) {
    case Element::kInt8:
      return kInt8;
    case Element::kBool:
      return kBoolean;
    case Element::kFloat8E4M3:
      return kE4M3;
    case Element::kFloat8E4M3Uz:
      return kE4M3Uz;
    case Element::kFloat8E5M2:
      return kE5M2;
    case Element::kFloat8E5M2Uz:
      return kE5M2Uz;
    case Element::kFloat8E8M0:
      return kE8M0;
    default:
      return kUint8;
  }
}

}  // namespace ptsave::statistics_internal
