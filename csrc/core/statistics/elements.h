// Converts a few thousand elements of any format and alignment into numbers for loops.  Internal to
// statistics.cpp and difference.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/statistics/moments.h"
#include "core/statistics/small_floats.h"
#include "core/statistics/statistics.h"

namespace ptsave::statistics_internal {

// The values of a format of one byte.
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

inline NonFinite non_finite_in(const float* data, std::size_t n) {
  return moments_kernel().non_finite_floats(data, n);
}
inline NonFinite non_finite_in(const double* data, std::size_t n) {
  return moments_kernel().non_finite_doubles(data, n);
}

}  // namespace ptsave::statistics_internal
