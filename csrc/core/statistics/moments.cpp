// The loops of MomentsKernel, vectorized by the compiler for each kind of CPU.
//
// In this file CMakeLists.txt lets the compiler change the order of additions, which vectorized
// sums need, and assume that all numbers are finite.  Therefore NaN and infinity are found by their
// bits.
#include <array>
#include <bit>
#include <cstring>

#include "core/statistics/kernels.h"

namespace ptsave::statistics_internal {
namespace {

// The sum of `term` of all numbers, in four chains, because an addition waits for the previous one
// in its chain.
template <typename Number, typename Term>
PTSAVE_INLINE double sum_of(const Number* data, std::size_t n, const Term& term) {
  const std::size_t quarter = n / 4;
  double a = 0;
  double b = 0;
  double c = 0;
  double d = 0;
  for (std::size_t i = 0; i < quarter; ++i) {
    a += term(data[i]);
    b += term(data[quarter + i]);
    c += term(data[2 * quarter + i]);
    d += term(data[3 * quarter + i]);
  }
  for (std::size_t i = 4 * quarter; i < n; ++i) a += term(data[i]);
  return (a + b) + (c + d);
}

// A lambda would not be inlined into a function with other CPU features.
struct Itself {
  template <typename Number>
  PTSAVE_INLINE double operator()(Number x) const {
    return static_cast<double>(x);
  }
};
struct SquaredDistance {
  double mean;
  template <typename Number>
  PTSAVE_INLINE double operator()(Number x) const {
    const double distance = static_cast<double>(x) - mean;
    return distance * distance;
  }
};

template <typename Number>
PTSAVE_INLINE Moments moments_of(const Number* data, std::size_t n) {
  const double mean = sum_of(data, n, Itself{}) / static_cast<double>(n);
  Number low = data[0];
  Number high = data[0];
  std::uint32_t n_zero = 0;
  for (std::size_t i = 0; i < n; ++i) {
    low = data[i] < low ? data[i] : low;
    high = data[i] > high ? data[i] : high;
  }
  for (std::size_t i = 0; i < n; ++i) n_zero += data[i] == 0 ? 1U : 0U;
  const double squares = sum_of(data, n, SquaredDistance{mean});
  return {n_zero, mean, squares, static_cast<double>(low), static_cast<double>(high)};
}

template <typename Number>
PTSAVE_INLINE NonFinite non_finite(const Number* data, std::size_t n) {
  using Bits = BitsOf<Number>;
  constexpr Bits kWithoutSign = static_cast<Bits>(~Bits{0}) >> 1;
  Bits n_nan = 0;
  Bits n_both = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Bits magnitude = std::bit_cast<Bits>(data[i]) & kWithoutSign;
    n_nan += magnitude > kInfinityBits<Number> ? 1U : 0U;
    n_both += magnitude >= kInfinityBits<Number> ? 1U : 0U;
  }
  return {n_nan, n_both - n_nan};
}

// Avoids multiplying subnormal numbers, because some threads flush them to zero.
PTSAVE_INLINE void from_half(const std::uint16_t* data, std::size_t n, float* result) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t half = data[i];
    const std::uint32_t magnitude = (half & 0x7FFF) << 13;
    const std::uint32_t exponent = half & 0x7C00;
    const std::uint32_t normal = magnitude + (112U << 23);
    const auto shifted = std::bit_cast<float>(magnitude + (113U << 23));
    const auto subnormal = std::bit_cast<std::uint32_t>(shifted - 0x1p-14F);
    const std::uint32_t finite = exponent == 0 ? subnormal : normal;
    const std::uint32_t bits = exponent == 0x7C00 ? magnitude | 0x7F80'0000 : finite;
    const std::uint32_t sign = (half & 0x8000) << 16;
    std::memcpy(&result[i], std::array{bits | sign}.data(), sizeof(float));
  }
}

// The loops, each inlined into a function that names the CPU's features.
#define PTSAVE_KERNEL(NAME, TARGET)                                                       \
  template <typename Number>                                                              \
  TARGET Moments moments_##NAME(const Number* data, std::size_t n) {                      \
    return moments_of(data, n);                                                           \
  }                                                                                       \
  template <typename Number>                                                              \
  TARGET NonFinite non_finite_##NAME(const Number* data, std::size_t n) {                 \
    return non_finite(data, n);                                                           \
  }                                                                                       \
  void TARGET from_half_##NAME(const std::uint16_t* data, std::size_t n, float* result) { \
    from_half(data, n, result);                                                           \
  }
#define PTSAVE_LOOPS(NAME, NUMBER) {moments_##NAME<NUMBER>, non_finite_##NAME<NUMBER>}
#define PTSAVE_KERNEL_ENTRY(NAME, SUPPORTED) \
  {#NAME, (SUPPORTED), PTSAVE_LOOPS(NAME, float), PTSAVE_LOOPS(NAME, double), from_half_##NAME}

PTSAVE_KERNEL(portable, )
#if defined(__x86_64__)
PTSAVE_KERNEL(avx2, __attribute__((target(PTSAVE_AVX2))))
PTSAVE_KERNEL(avx512, __attribute__((target(PTSAVE_AVX512))))
#endif

}  // namespace

const MomentsKernel kMomentsKernels[] = {
    PTSAVE_KERNEL_ENTRY(portable, [] { return true; }),
#if defined(__x86_64__)
    PTSAVE_KERNEL_ENTRY(avx2, avx2_supported),
    PTSAVE_KERNEL_ENTRY(avx512, avx512_supported),
#endif
};
const std::size_t kNMomentsKernels = std::size(kMomentsKernels);

const MomentsKernel& moments_kernel() {
  static const MomentsKernel& best = best_of(kMomentsKernels, kNMomentsKernels);
  return best;
}

}  // namespace ptsave::statistics_internal
