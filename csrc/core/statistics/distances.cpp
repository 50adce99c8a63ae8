// The loops of DistancesKernel, vectorized by the compiler for each kind of CPU.
//
// In this file CMakeLists.txt lets the compiler change the order of additions, which vectorized
// sums need, and assume that all numbers are finite.
#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <type_traits>

#include "core/statistics/kernels.h"

namespace ptsave::statistics_internal {
namespace {

PTSAVE_INLINE double magnitude(double x) { return x < 0 ? -x : x; }

template <typename Number>
PTSAVE_INLINE double squares_of(const Number* data, std::size_t n) {
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto x = static_cast<double>(data[i]);
    sum += x * x;
  }
  return sum;
}

template <typename Number>
PTSAVE_INLINE Distances distances_of(const Number* a, const Number* b, std::size_t n,
                                     const Tolerance& tolerance, double ratio) {
  Distances result;
  std::uint64_t n_outside = 0;  // as wide as the numbers, for vectorization
  std::uint64_t n_larger = 0;
  double largest = 0;
  double product = 0;
  double squares_a = 0;
  double squares_b = 0;
  const double relative = tolerance.relative;
  const double absolute = tolerance.absolute;
  for (std::size_t i = 0; i < n; ++i) {
    const auto x = static_cast<double>(a[i]);
    const auto y = static_cast<double>(b[i]);
    const double distance = magnitude(x - y);
    const double size = magnitude(y);
    largest = distance > largest ? distance : largest;
    n_outside += distance > absolute + relative * size ? 1U : 0U;
    n_larger += distance > ratio * size ? 1U : 0U;
    product += x * y;
    squares_a += x * x;
    squares_b += y * y;
  }
  result.n_outside = n_outside;
  result.max_abs = largest;
  result.product = product;
  result.squares_a = squares_a;
  result.squares_b = squares_b;
  result.has_larger_ratio = n_larger != 0;
  return result;
}

template <typename Number>
PTSAVE_INLINE double largest_ratio(const Number* a, const Number* b, std::size_t n) {
  double largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto y = static_cast<double>(b[i]);
    const double distance = magnitude(static_cast<double>(a[i]) - y);
    const double ratio = distance > 0 ? distance / magnitude(y) : 0;
    largest = ratio > largest ? ratio : largest;
  }
  return largest;
}

// Rounds numbers to the nearest position of a grid, and ties to even.
template <typename Number>
struct Positions {
  static constexpr bool kIsFloat = std::is_same_v<Number, float>;
  using Bits = BitsOf<Number>;
  static constexpr int kMantissaNbits = kIsFloat ? 23 : 52;
  static constexpr Bits kBias = kIsFloat ? 127 : 1023;
  static constexpr Bits kWithoutSign = static_cast<Bits>(~Bits{0}) >> 1;

  int shift;
  Bits is_odd;        // 1 if numbers are rounded at all
  Bits nearly_half;   // of a step
  Bits first_normal;  // the bits of the smallest normal number
  Bits offset;
  Number scale;  // makes the step of small numbers 1

  PTSAVE_INLINE explicit Positions(Grid grid) {
    shift = kMantissaNbits - grid.mantissa_nbits;
    is_odd = shift == 0 ? 0 : 1;
    nearly_half = shift == 0 ? 0 : (Bits{1} << (shift - 1)) - 1;
    const Bits exponent = kBias + static_cast<Bits>(grid.min_exponent);
    const bool same_exponents = exponent == 1;  // small numbers are already equally far apart
    first_normal = same_exponents ? 0 : exponent << kMantissaNbits;
    offset = same_exponents ? 0 : (exponent - 1) << grid.mantissa_nbits;
    const Bits scale_exponent =
        kBias + static_cast<Bits>(grid.mantissa_nbits) - static_cast<Bits>(grid.min_exponent);
    scale = std::bit_cast<Number>(same_exponents ? Bits{0} : scale_exponent << kMantissaNbits);
  }

  PTSAVE_INLINE Bits operator()(Bits bits) const {
    const Bits whole = bits & kWithoutSign;
    const Bits rounded = (whole + nearly_half + ((whole >> shift) & is_odd)) >> shift;
    // The last bits of a sum with 2^kMantissaNbits are the other addend, rounded.
    constexpr auto kOne = static_cast<Number>(Bits{1} << kMantissaNbits);
    const Bits sum = std::bit_cast<Bits>(std::bit_cast<Number>(whole) * scale + kOne);
    const Bits small = sum & ((Bits{1} << kMantissaNbits) - 1);
    return whole < first_normal ? small : rounded - offset;
  }
};

// A float's exponent gives the number of bits of an integer, if rounding does not change it.
PTSAVE_INLINE std::uint32_t bucket_of(std::uint32_t distance) {
  const auto less = static_cast<std::int32_t>(distance) - 1;
  const auto number = static_cast<float>(less & ~(less >> 1));
  const std::uint32_t bucket = (std::bit_cast<std::uint32_t>(number) >> 23) - 125;
  return distance < 2 ? distance : bucket;
}
PTSAVE_INLINE std::uint32_t bucket_of(std::uint64_t distance) {
  const auto nbits = static_cast<std::uint32_t>(64 - std::countl_zero((distance - 1) | 1));
  return distance < 2 ? static_cast<std::uint32_t>(distance) : nbits + 1;
}

template <typename Number>
PTSAVE_INLINE void ulps_of(const Number* a, const Number* b, std::size_t n, Grid grid,
                           std::uint8_t* result) {
  using Bits = BitsOf<Number>;
  const Positions<Number> position(grid);
  for (std::size_t i = 0; i < n; ++i) {
    const auto x = std::bit_cast<Bits>(a[i]);
    const auto y = std::bit_cast<Bits>(b[i]);
    const Bits at = position(x);
    const Bits other = position(y);
    const Bits distance = at > other ? at - other : other - at;
    const std::uint32_t bucket = bucket_of(distance);
    // Zero has no sign here. gcc only vectorizes this as arithmetic.
    const Bits has_zero = (at == 0 ? 1U : 0U) | (other == 0 ? 1U : 0U);
    const Bits sign_differs = ((x ^ y) >> (8 * sizeof(Bits) - 1)) & ~has_zero & 1;
    result[i] = static_cast<std::uint8_t>(sign_differs != 0 ? std::uint32_t{kNoUlps} : bucket);
  }
}

// The exponent of (distance - 1) is its number of bits, minus one.
template <typename Number>
PTSAVE_INLINE void ulps_of_integers(const Number* a, const Number* b, std::size_t n,
                                    std::uint8_t* result) {
  using Bits = BitsOf<Number>;
  constexpr int kMantissaNbits = sizeof(Number) == 4 ? 23 : 52;
  constexpr Bits kBias = sizeof(Number) == 4 ? 127 : 1023;
  for (std::size_t i = 0; i < n; ++i) {
    const Number difference = a[i] - b[i];
    const Number distance = difference < 0 ? -difference : difference;
    const Bits bucket = (std::bit_cast<Bits>(distance - 1) >> kMantissaNbits) - kBias + 2;
    const Bits few = distance != 0 ? 1 : 0;
    result[i] = static_cast<std::uint8_t>(distance < 2 ? few : bucket);
  }
}

PTSAVE_INLINE std::uint32_t count_equal(const std::uint8_t* data, std::size_t n,
                                        std::uint8_t value) {
  static_assert(kPairsLength <= std::numeric_limits<std::uint16_t>::max());
  std::uint16_t count = 0;  // narrow, so that many fit a register
  for (std::size_t i = 0; i < n; ++i)
    count = static_cast<std::uint16_t>(count + (data[i] == value ? 1 : 0));
  return count;
}

// Four tables, because with one table equal neighbours would wait for each other.
PTSAVE_INLINE void count_each(const std::uint8_t* ulps, std::size_t n, std::uint64_t* counts) {
  std::uint32_t tables[4][kNUlpBuckets] = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    std::uint64_t word = 0;
    __builtin_memcpy(&word, ulps + i, sizeof word);
    ++tables[0][word & 0xFF];
    ++tables[1][(word >> 8) & 0xFF];
    ++tables[2][(word >> 16) & 0xFF];
    ++tables[3][(word >> 24) & 0xFF];
    ++tables[0][(word >> 32) & 0xFF];
    ++tables[1][(word >> 40) & 0xFF];
    ++tables[2][(word >> 48) & 0xFF];
    ++tables[3][word >> 56];
  }
  for (; i < n; ++i) ++tables[0][ulps[i]];
  for (std::size_t bucket = 0; bucket < kNUlpBuckets; ++bucket) {
    for (const auto& table : tables) counts[bucket] += table[bucket];
  }
}

PTSAVE_INLINE std::uint8_t smallest_of(const std::uint8_t* data, std::size_t n) {
  std::uint8_t smallest = std::numeric_limits<std::uint8_t>::max();
  for (std::size_t i = 0; i < n; ++i) smallest = data[i] < smallest ? data[i] : smallest;
  return smallest;
}

// The pairs of a block are usually in a few neighbouring buckets; counting these one by one takes
// less time.
PTSAVE_INLINE void count_ulps(const std::uint8_t* ulps, std::size_t n, std::uint64_t* counts) {
  constexpr int kNTries = 20;
  constexpr int kNFirst = 6;  // if more than half are in others, count_each() is faster
  std::uint32_t found[kNUlpBuckets] = {};
  found[kNoUlps] = count_equal(ulps, n, kNoUlps);
  std::size_t n_left = n - found[kNoUlps];
  std::uint8_t bucket = n_left > 0 ? smallest_of(ulps, n) : std::uint8_t{0};
  for (int i = 0; i < kNTries && n_left > 0 && bucket < kNUlpBuckets; ++i, ++bucket) {
    if (i == kNFirst && n_left > n / 2) break;
    found[bucket] = count_equal(ulps, n, bucket);
    n_left -= found[bucket];
  }
  if (n_left > 0) {
    count_each(ulps, n, counts);
    return;
  }
  for (std::size_t i = 0; i < kNUlpBuckets; ++i) counts[i] += found[i];
}

template <typename Number>
PTSAVE_INLINE PairKinds kinds_of(const Number* a, const Number* b, std::size_t n) {
  using Bits = BitsOf<Number>;
  constexpr Bits kWithoutSign = static_cast<Bits>(~Bits{0}) >> 1;
  Bits n_different = 0;
  Bits n_not_finite = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto x = std::bit_cast<Bits>(a[i]);
    const auto y = std::bit_cast<Bits>(b[i]);
    const Bits size_x = x & kWithoutSign;
    const Bits size_y = y & kWithoutSign;
    const Bits other_bits = x != y ? 1U : 0U;
    n_different += (size_x | size_y) != 0 ? other_bits : 0U;
    const Bits other_x = size_x >= kInfinityBits<Number> ? 1U : 0U;
    n_not_finite += size_y >= kInfinityBits<Number> ? 1U : other_x;
  }
  return {n_different, n_not_finite};
}

#define PTSAVE_KERNEL(NAME, TARGET)                                                               \
  template <typename Number>                                                                      \
  TARGET Distances distances_##NAME(const Number* a, const Number* b, std::size_t n,              \
                                    const Tolerance& tolerance, double ratio) {                   \
    return distances_of(a, b, n, tolerance, ratio);                                               \
  }                                                                                               \
  template <typename Number>                                                                      \
  double TARGET ratio_##NAME(const Number* a, const Number* b, std::size_t n) {                   \
    return largest_ratio(a, b, n);                                                                \
  }                                                                                               \
  template <typename Number>                                                                      \
  double TARGET squares_##NAME(const Number* data, std::size_t n) {                               \
    return squares_of(data, n);                                                                   \
  }                                                                                               \
  template <typename Number>                                                                      \
  void TARGET ulps_##NAME(const Number* a, const Number* b, std::size_t n, Grid grid,             \
                          std::uint8_t* result) {                                                 \
    return ulps_of(a, b, n, grid, result);                                                        \
  }                                                                                               \
  template <typename Number>                                                                      \
  void TARGET integers_##NAME(const Number* a, const Number* b, std::size_t n,                    \
                              std::uint8_t* result) {                                             \
    return ulps_of_integers(a, b, n, result);                                                     \
  }                                                                                               \
  template <typename Number>                                                                      \
  TARGET PairKinds kinds_##NAME(const Number* a, const Number* b, std::size_t n) {                \
    return kinds_of(a, b, n);                                                                     \
  }                                                                                               \
  void TARGET count_ulps_##NAME(const std::uint8_t* ulps, std::size_t n, std::uint64_t* counts) { \
    count_ulps(ulps, n, counts);                                                                  \
  }
#define PTSAVE_LOOPS(NAME, NUMBER)                                            \
  {distances_##NAME<NUMBER>, ratio_##NAME<NUMBER>,    squares_##NAME<NUMBER>, \
   ulps_##NAME<NUMBER>,      integers_##NAME<NUMBER>, kinds_##NAME<NUMBER>}
#define PTSAVE_KERNEL_ENTRY(NAME, SUPPORTED) \
  {#NAME, (SUPPORTED), PTSAVE_LOOPS(NAME, float), PTSAVE_LOOPS(NAME, double), count_ulps_##NAME}

PTSAVE_KERNEL(portable, )
#if defined(__x86_64__)
PTSAVE_KERNEL(avx2, __attribute__((target(PTSAVE_AVX2))))
PTSAVE_KERNEL(avx512, __attribute__((target(PTSAVE_AVX512))))
#endif

}  // namespace

const DistancesKernel kDistancesKernels[] = {
    PTSAVE_KERNEL_ENTRY(portable, [] { return true; }),
#if defined(__x86_64__)
    PTSAVE_KERNEL_ENTRY(avx2, avx2_supported),
    PTSAVE_KERNEL_ENTRY(avx512, avx512_supported),
#endif
};
const std::size_t kNDistancesKernels = std::size(kDistancesKernels);

const DistancesKernel& distances_kernel() {
  static const DistancesKernel& best = best_of(kDistancesKernels, kNDistancesKernels);
  return best;
}

}  // namespace ptsave::statistics_internal
