#include "core/statistics/elements.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ptsave::statistics_internal {
namespace {

template <typename To>
void read_table(Element element, const std::byte* data, std::size_t n, To* result) {
  const ByteValues& values = values_of(element);
  for (std::size_t i = 0; i < n; ++i) {
    result[i] = static_cast<To>(values[std::to_integer<std::size_t>(data[i])]);
  }
}

void read_pairs_of_nibbles(const std::byte* data, std::size_t n, float* result) {
  for (std::size_t i = 0; i < n; ++i) {
    const auto byte = std::to_integer<unsigned>(data[i / 2]);
    result[i] = static_cast<float>(kFloat4E2M1(i % 2 == 0 ? byte & 0xF : byte >> 4));
  }
}

}  // namespace

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

void read(Element element, const std::byte* data, std::size_t n, float* result) {
  switch (element) {
    case Element::kFloat32:
      return convert<float>(data, n, result);
    case Element::kFloat16:
      return convert<Half>(data, n, result);
    case Element::kBFloat16:
      return convert<BFloat16>(data, n, result);
    case Element::kInt16:
      return convert<std::int16_t>(data, n, result);
    case Element::kUInt16:
      return convert<std::uint16_t>(data, n, result);
    case Element::kInt8:
      return convert<std::int8_t>(data, n, result);
    case Element::kUInt8:
      return convert<std::uint8_t>(data, n, result);
    case Element::kFloat4E2M1Pair:
      return read_pairs_of_nibbles(data, n, result);
    default:
      return read_table(element, data, n, result);
  }
}

void read(Element element, const std::byte* data, std::size_t n, double* result) {
  switch (element) {
    case Element::kFloat64:
      return convert<double>(data, n, result);
    case Element::kInt64:
      return convert<std::int64_t>(data, n, result);
    case Element::kUInt64:
      return convert<std::uint64_t>(data, n, result);
    case Element::kInt32:
      return convert<std::int32_t>(data, n, result);
    case Element::kUInt32:
      return convert<std::uint32_t>(data, n, result);
    default: {
      std::array<float, kBlockLength> floats;
      read(element, data, n, floats.data());
      std::copy_n(floats.begin(), n, result);
    }
  }
}

void read(Element element, const std::byte* data, std::size_t n, std::int64_t* result) {
  switch (element) {
    case Element::kInt64:
    case Element::kUInt64:
      return convert<std::int64_t>(data, n, result);
    case Element::kInt32:
      return convert<std::int32_t>(data, n, result);
    case Element::kUInt32:
      return convert<std::uint32_t>(data, n, result);
    case Element::kInt16:
      return convert<std::int16_t>(data, n, result);
    case Element::kUInt16:
      return convert<std::uint16_t>(data, n, result);
    default:
      return read_table(element, data, n, result);
  }
}

}  // namespace ptsave::statistics_internal
