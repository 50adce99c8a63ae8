// Differences against a plain loop over numbers that are decoded one by one.
#include "core/statistics/difference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/statistics/kernels.h"

namespace ptsave {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A floating-point format by its parts: no table and no bits of the code under test.
struct Format {
  Element element;
  int exponent_nbits;
  int mantissa_nbits;
  int bias;

  double decode(std::uint64_t bits) const {
    const std::uint64_t mantissa = bits & ((std::uint64_t{1} << mantissa_nbits) - 1);
    const int largest = (1 << exponent_nbits) - 1;
    const int exponent = static_cast<int>(bits >> mantissa_nbits) & largest;
    const double sign = (bits >> (exponent_nbits + mantissa_nbits) & 1) != 0 ? -1.0 : 1.0;
    if (exponent == largest) return mantissa == 0 ? sign * kInfinity : kNan;
    const double fraction = std::ldexp(static_cast<double>(mantissa), -mantissa_nbits);
    return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                         : sign * std::ldexp(1 + fraction, exponent - bias);
  }
  // How many numbers of the format lie between zero and the one nearest to x, with x's sign.
  double position(double x) const {
    const double size = std::abs(x);
    const int exponent = size == 0 ? 1 - bias : std::max(1 - bias, std::ilogb(size));
    const double steps = std::nearbyint(std::ldexp(size, mantissa_nbits - exponent));
    const double before = std::ldexp(static_cast<double>(exponent - (1 - bias)), mantissa_nbits);
    return std::copysign(before + steps, x);
  }
};

constexpr Format kFloat64{Element::kFloat64, 11, 52, 1023};
constexpr Format kFloat32{Element::kFloat32, 8, 23, 127};
constexpr Format kFloat16{Element::kFloat16, 5, 10, 15};
constexpr Format kBFloat16{Element::kBFloat16, 8, 7, 127};
constexpr Format kFloat8E5M2{Element::kFloat8E5M2, 5, 2, 15};
constexpr Format kFormats[] = {kFloat64, kFloat32, kFloat16, kBFloat16, kFloat8E5M2};

std::vector<std::byte> random_elements(const Format& format, std::size_t n, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::vector<std::byte> result(n * nbytes_of(format.element));
  for (std::byte& each : result) each = static_cast<std::byte>(generator());
  return result;
}

std::vector<double> decode(const Format& format, const std::vector<std::byte>& bytes) {
  const std::size_t nbytes = nbytes_of(format.element);
  std::vector<double> result(bytes.size() / nbytes);
  for (std::size_t i = 0; i < result.size(); ++i) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * nbytes, nbytes);
    result[i] = format.decode(bits);
  }
  return result;
}

std::size_t bucket_of(double ulps) {
  std::size_t bucket = 0;
  for (double most = 0; ulps > most; most = most == 0 ? 1 : 2 * most) ++bucket;
  return bucket;
}

std::size_t bucket_of(const Format& coarser, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? 0 : kNoUlps;
  if (std::isinf(a) || std::isinf(b)) return a == b ? 0 : kNoUlps;
  const double x = coarser.position(a);
  const double y = coarser.position(b);
  return x * y < 0 ? kNoUlps : bucket_of(std::abs(std::abs(x) - std::abs(y)));
}

// Everything but the count of elements with other bits.
Difference expected_of(const std::vector<double>& a, const std::vector<double>& b,
                       const Format& coarser, const Tolerance& tolerance) {
  Difference result;
  result.n = a.size();
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = a[i];
    const double y = b[i];
    result.n_nan_a += std::isnan(x) ? 1U : 0U;
    result.n_nan_b += std::isnan(y) ? 1U : 0U;
    result.n_inf_a += std::isinf(x) ? 1U : 0U;
    result.n_inf_b += std::isinf(y) ? 1U : 0U;
    ++result.ulps[bucket_of(coarser, x, y)];
    if (std::isnan(x) && std::isnan(y)) continue;
    if (std::isnan(x) || std::isnan(y)) {
      ++(std::isnan(x) ? result.n_nan_only_a : result.n_nan_only_b);
      ++result.n_outside;
      continue;
    }
    if (std::isfinite(x) && std::isfinite(y)) {
      result.products.product += x * y;
      result.products.squares_a += x * x;
      result.products.squares_b += y * y;
    }
    if (x == y) continue;
    const bool infinite = std::isinf(x) || std::isinf(y);
    result.n_inf_mismatch += infinite ? 1U : 0U;
    const double distance = infinite ? kInfinity : std::abs(x - y);
    result.max_abs = std::max(result.max_abs, distance);
    result.max_rel = std::max(result.max_rel, infinite ? kInfinity : distance / std::abs(y));
    const double allowed = tolerance.absolute + tolerance.relative * std::abs(y);
    result.n_outside += infinite || distance > allowed ? 1U : 0U;
  }
  return result;
}

void expect_near(double found, double expected) {
  if (std::isfinite(expected)) {
    EXPECT_NEAR(found, expected, 1e-9 * std::abs(expected));
  } else {
    EXPECT_EQ(std::isnan(found), std::isnan(expected));
  }
}

void expect_same(const Difference& found, const Difference& expected) {
  EXPECT_EQ(found.n, expected.n);
  EXPECT_EQ(found.n_outside, expected.n_outside);
  EXPECT_EQ(found.n_nan_a, expected.n_nan_a);
  EXPECT_EQ(found.n_nan_b, expected.n_nan_b);
  EXPECT_EQ(found.n_inf_a, expected.n_inf_a);
  EXPECT_EQ(found.n_inf_b, expected.n_inf_b);
  EXPECT_EQ(found.n_nan_only_a, expected.n_nan_only_a);
  EXPECT_EQ(found.n_nan_only_b, expected.n_nan_only_b);
  EXPECT_EQ(found.n_inf_mismatch, expected.n_inf_mismatch);
  EXPECT_EQ(found.max_abs, expected.max_abs);
  EXPECT_EQ(found.max_rel, expected.max_rel);
  EXPECT_EQ(found.ulps, expected.ulps);
}

Difference difference(const Format& of_a, const std::vector<std::byte>& a, const Format& of_b,
                      const std::vector<std::byte>& b, const Tolerance& tolerance = {},
                      std::size_t n_threads = 1) {
  return difference_of(of_a.element, a.data(), of_b.element, b.data(),
                       a.size() / nbytes_of(of_a.element), tolerance, n_threads, [] {});
}

// `a` and `b` are numbers of the format, one or several for an element.
template <typename Number>
Difference difference(Element element, const std::vector<Number>& a, const std::vector<Number>& b,
                      const Tolerance& tolerance = {}, std::size_t n_threads = 1) {
  const std::size_t n = a.size() * sizeof(Number) / nbytes_of(element);
  return difference_of(element, a.data(), element, b.data(), n, tolerance, n_threads, [] {});
}

std::vector<const statistics_internal::DistancesKernel*> supported_kernels() {
  std::vector<const statistics_internal::DistancesKernel*> kernels;
  for (std::size_t i = 0; i < statistics_internal::kNDistancesKernels; ++i) {
    const auto& kernel = statistics_internal::kDistancesKernels[i];
    if (kernel.supported()) kernels.push_back(&kernel);
  }
  return kernels;
}

float flipped(float x, std::uint64_t bits) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) ^ static_cast<std::uint32_t>(bits));
}

// Random bits: all exponents, subnormal numbers, infinities and NaNs of every payload.
TEST(Difference, OfEveryPairOfFormats) {
  for (const Format& of_a : kFormats) {
    for (const Format& of_b : kFormats) {
      SCOPED_TRACE(testing::Message() << of_a.mantissa_nbits << " " << of_b.mantissa_nbits);
      const auto a = random_elements(of_a, 5'000, 1);
      const auto b = random_elements(of_b, 5'000, 2);
      const Format& coarser = of_a.mantissa_nbits < of_b.mantissa_nbits ? of_a : of_b;
      const Tolerance tolerance{0.5, 1e-3};
      const Difference found = difference(of_a, a, of_b, b, tolerance);
      const auto x = decode(of_a, a);
      const auto y = decode(of_b, b);
      expect_same(found, expected_of(x, y, coarser, tolerance));
      if (&of_a != &of_b) {
        std::size_t n_different = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
          n_different += x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i])) ? 0U : 1U;
        }
        EXPECT_EQ(found.n_different, n_different);
      }
    }
  }
}

// Numbers near each other, of all sizes around those of blocks and chunks.
TEST(Difference, OfManySizes) {
  for (const std::size_t n : {1U, 7U, 2047U, 2048U, 2049U, 262'144U, 262'147U, 1'100'000U}) {
    std::mt19937 generator(3);
    std::normal_distribution<float> normal;
    std::vector<float> a(n);
    for (float& each : a) each = normal(generator);
    std::vector<float> b = a;
    for (std::size_t i = n / 2; i < n; i += 3) b[i] = flipped(a[i], generator() & 0xFF);
    const Tolerance tolerance{1e-6, 0};
    const Difference found = difference(Element::kFloat32, a, b, tolerance, 3);
    const std::vector<double> x(a.begin(), a.end());
    const std::vector<double> y(b.begin(), b.end());
    const Difference expected = expected_of(x, y, kFloat32, tolerance);
    expect_same(found, expected);
    expect_near(found.products.product, expected.products.product);
    expect_near(found.products.squares_a, expected.products.squares_a);
    expect_near(found.products.squares_b, expected.products.squares_b);
    std::size_t first = 0;
    while (first < n && a[first] == b[first]) ++first;
    EXPECT_EQ(found.first_different, first);
  }
}

TEST(Difference, OfNothing) {
  const Difference found =
      difference_of(Element::kFloat32, nullptr, Element::kBFloat16, nullptr, 0);
  EXPECT_EQ(found.n, 0U);
  EXPECT_EQ(found.n_different, 0U);
  EXPECT_EQ(found.max_abs, 0);
}

TEST(Difference, OfTheSameBytes) {
  std::vector<float> a(10'000, 2);
  a[5'000] = std::numeric_limits<float>::quiet_NaN();
  a[6'000] = std::numeric_limits<float>::infinity();
  const Difference found = difference(Element::kFloat32, a, a);
  EXPECT_EQ(found.n_different, 0U);
  EXPECT_EQ(found.first_different, a.size());
  EXPECT_EQ(found.ulps[0], a.size());
  EXPECT_EQ(found.n_nan_a + found.n_nan_b, 2U);
  EXPECT_EQ(found.n_inf_a + found.n_inf_b, 2U);
  EXPECT_EQ(found.products.squares_b, 4.0 * 9'998);
}

// Zeros of two signs differ by their bits, and by nothing else; so do NaNs.
TEST(Difference, OfBitsAlone) {
  const std::vector<float> a = {0.0F, std::bit_cast<float>(0x7FC0'0000U), 1};
  const std::vector<float> b = {-0.0F, std::bit_cast<float>(0xFFC0'1234U), 1};
  const Difference found = difference(Element::kFloat32, a, b);
  EXPECT_EQ(found.n_different, 2U);
  EXPECT_EQ(found.first_different, 0U);
  EXPECT_EQ(found.n_outside, 0U);
  EXPECT_EQ(found.ulps[0], 3U);
}

TEST(Difference, OfWholeNumbersIsExact) {
  const std::int64_t low = std::numeric_limits<std::int64_t>::min();
  const std::int64_t high = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::int64_t> a = {low, 5, (std::int64_t{1} << 62) + 1, -3};
  const std::vector<std::int64_t> b = {high, 5, std::int64_t{1} << 62, -5};
  const Difference found = difference(Element::kInt64, a, b);
  EXPECT_EQ(found.max_abs_integer,
            (WholeDistance{false, std::numeric_limits<std::uint64_t>::max()}));
  EXPECT_EQ(found.n_different, 3U);
  EXPECT_EQ(found.ulps[0], 1U);
  EXPECT_EQ(found.ulps[1], 1U);
  EXPECT_EQ(found.ulps[2], 1U);
  EXPECT_EQ(found.ulps[kNoUlps], 1U);

  const std::vector<std::uint64_t> c = {std::numeric_limits<std::uint64_t>::max()};
  const Difference mixed = difference_of(Element::kInt64, a.data(), Element::kUInt64, c.data(), 1);
  EXPECT_EQ(mixed.max_abs, 0x1p64 + 0x1p63);
  EXPECT_EQ(mixed.max_abs_integer, (WholeDistance{true, (std::uint64_t{1} << 63) - 1}));
  EXPECT_EQ(mixed.n_different, 1U);
  const std::vector<std::int8_t> d = {-1};
  const std::vector<std::uint8_t> e = {255};
  EXPECT_EQ(difference_of(Element::kInt8, d.data(), Element::kUInt8, e.data(), 1).max_abs_integer,
            (WholeDistance{false, 256}));
}

TEST(Difference, OfComplexNumbers) {
  const std::vector<float> a = {1, 2, 3, 4};
  const std::vector<float> b = {1, 2, 0, 8};
  const Difference found = difference(Element::kComplex64, a, b);
  EXPECT_EQ(found.n, 2U);
  EXPECT_EQ(found.n_different, 1U);
  EXPECT_EQ(found.first_different, 1U);
  EXPECT_EQ(found.max_abs, 5);
  EXPECT_EQ(found.max_rel, 5.0 / 8);
  EXPECT_EQ(found.products.product, 5 + 32);
}

TEST(Difference, OfPairsOfNibbles) {
  const std::vector<std::uint8_t> a = {0x71, 0x22};
  const std::vector<std::uint8_t> b = {0x71, 0x32};
  const Difference found = difference(Element::kFloat4E2M1Pair, a, b);
  EXPECT_EQ(found.n, 4U);
  EXPECT_EQ(found.n_different, 1U);
  EXPECT_EQ(found.first_different, 3U);
  EXPECT_EQ(found.max_abs, 0.5);
  EXPECT_EQ(found.ulps[1], 1U);
  EXPECT_THROW(difference_of(Element::kFloat4E2M1Pair, a.data(), Element::kUInt8, b.data(), 2),
               std::invalid_argument);
}

TEST(Difference, OfUnalignedMemory) {
  const auto a = random_elements(kFloat64, 3'000, 4);
  const auto b = random_elements(kFloat64, 3'000, 5);
  std::vector<std::byte> moved(a.size() + 1);
  std::copy(a.begin(), a.end(), moved.begin() + 1);
  const Difference expected = difference(kFloat64, a, kFloat64, b);
  expect_same(
      difference_of(Element::kFloat64, moved.data() + 1, Element::kFloat64, b.data(), 3'000),
      expected);
}

TEST(Difference, DoesNotDependOnThreads) {
  const auto a = random_elements(kBFloat16, 3'000'001, 6);
  const auto b = random_elements(kBFloat16, 3'000'001, 7);
  const Difference alone = difference(kBFloat16, a, kBFloat16, b, {}, 1);
  const Difference together = difference(kBFloat16, a, kBFloat16, b, {}, 3);
  expect_same(together, alone);
  EXPECT_EQ(together.products.product, alone.products.product);
  EXPECT_EQ(together.first_different, alone.first_different);
}

TEST(Difference, KernelsAgree) {
  using namespace statistics_internal;
  std::mt19937 generator(8);
  std::vector<float> a(kPairsLength);
  std::vector<float> b(kPairsLength);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = std::bit_cast<float>(static_cast<std::uint32_t>(generator()) & 0xBFFF'FFFF);
    b[i] = flipped(a[i], generator() & 0xFFF);
  }
  const std::vector<double> x(a.begin(), a.end());
  const std::vector<double> y(b.begin(), b.end());
  const DistancesKernel& plain = kDistancesKernels[0];
  for (const DistancesKernel* kernel : supported_kernels()) {
    SCOPED_TRACE(kernel->name);
    const Tolerance tolerance{1e-4, 1e-6};
    const Distances expected =
        plain.doubles.distances(x.data(), y.data(), x.size(), tolerance, 1e-5);
    for (const Distances& found :
         {kernel->floats.distances(a.data(), b.data(), a.size(), tolerance, 1e-5),
          kernel->doubles.distances(x.data(), y.data(), x.size(), tolerance, 1e-5)}) {
      EXPECT_EQ(found.max_abs, expected.max_abs);
      EXPECT_EQ(found.n_outside, expected.n_outside);
      EXPECT_EQ(found.has_larger_ratio, expected.has_larger_ratio);
      expect_near(found.product, expected.product);
      expect_near(found.squares_a, expected.squares_a);
      expect_near(found.squares_b, expected.squares_b);
    }
    EXPECT_EQ(kernel->floats.largest_ratio(a.data(), b.data(), a.size()),
              plain.doubles.largest_ratio(x.data(), y.data(), x.size()));
    expect_near(kernel->floats.squares(a.data(), a.size()), expected.squares_a);
    for (const Grid grid : {Grid{23, -126}, Grid{10, -14}, Grid{7, -126}, Grid{0, -126}}) {
      std::vector<std::uint8_t> ulps(a.size());
      std::vector<std::uint8_t> others(a.size());
      plain.doubles.ulps(x.data(), y.data(), x.size(), grid, ulps.data());
      kernel->floats.ulps(a.data(), b.data(), a.size(), grid, others.data());
      EXPECT_EQ(others, ulps);
      kernel->doubles.ulps(x.data(), y.data(), x.size(), grid, others.data());
      EXPECT_EQ(others, ulps);
    }
  }
}

// Of 0, 1, 2, ... up to numbers that a float just holds exactly, and of both signs.
TEST(Difference, KernelsAgreeOnWholeNumbers) {
  using namespace statistics_internal;
  std::vector<float> a(kPairsLength);
  std::vector<float> b(kPairsLength);
  std::vector<std::uint8_t> expected(kPairsLength);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const int distance = i < 1024 ? static_cast<int>(i) : (1 << (i % 24)) + static_cast<int>(i % 3);
    a[i] = i % 2 == 0 ? -3.0F : 3.0F;
    b[i] = a[i] + static_cast<float>(i % 2 == 0 ? distance : -distance);
    expected[i] = static_cast<std::uint8_t>(bucket_of(distance));
  }
  const std::vector<double> x(a.begin(), a.end());
  const std::vector<double> y(b.begin(), b.end());
  for (const DistancesKernel* kernel : supported_kernels()) {
    SCOPED_TRACE(kernel->name);
    std::vector<std::uint8_t> ulps(a.size());
    kernel->floats.ulps_of_integers(a.data(), b.data(), a.size(), ulps.data());
    EXPECT_EQ(ulps, expected);
    kernel->doubles.ulps_of_integers(y.data(), x.data(), x.size(), ulps.data());
    EXPECT_EQ(ulps, expected);
  }
}

// In all, in few, in many and in the last ones of the buckets.
TEST(Difference, KernelsCountUlps) {
  using namespace statistics_internal;
  std::mt19937 generator(9);
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{77}, kPairsLength}) {
    for (const std::size_t n_buckets : {1U, 3U, 10U, 30U, 66U}) {
      std::vector<std::uint8_t> ulps(n);
      std::vector<std::uint64_t> expected(kNUlpBuckets, 5);
      for (std::uint8_t& each : ulps) {
        each = static_cast<std::uint8_t>(generator() % n_buckets);
        if (generator() % 20 == 0) each = kNoUlps;
        ++expected[each];
      }
      for (const DistancesKernel* kernel : supported_kernels()) {
        std::vector<std::uint64_t> counts(kNUlpBuckets, 5);
        kernel->count_ulps(ulps.data(), n, counts.data());
        EXPECT_EQ(counts, expected) << kernel->name << " " << n << " " << n_buckets;
      }
    }
  }
}

TEST(Difference, KernelsAgreeOnKinds) {
  using namespace statistics_internal;
  const std::vector<float> a = {0, -0.0F, 1, 1e-45F, 0, -1, 5, 5};
  const std::vector<float> b = {-0.0F, 0, 1, 0, -1e-45F, 1, 5, 6};
  for (const DistancesKernel* kernel : supported_kernels()) {
    SCOPED_TRACE(kernel->name);
    for (std::size_t n = 0; n <= 40; ++n) {
      std::vector<float> x(n, 3);
      std::vector<float> y(n, 3);
      std::copy_n(a.begin(), std::min(n, a.size()), x.begin());
      std::copy_n(b.begin(), std::min(n, b.size()), y.begin());
      std::size_t n_different = 0;
      for (std::size_t k = 0; k < n; ++k) n_different += x[k] != y[k] ? 1U : 0U;
      const std::vector<double> wide_x(x.begin(), x.end());
      const std::vector<double> wide_y(y.begin(), y.end());
      EXPECT_EQ(kernel->floats.kinds(x.data(), y.data(), n).n_different, n_different);
      EXPECT_EQ(kernel->doubles.kinds(wide_x.data(), wide_y.data(), n).n_different, n_different);
      EXPECT_EQ(kernel->floats.kinds(x.data(), y.data(), n).n_not_finite, 0U);
      if (n == 0) continue;
      x[n - 1] = std::numeric_limits<float>::quiet_NaN();
      y[n / 2] = -std::numeric_limits<float>::infinity();
      const std::size_t n_not_finite = n - 1 == n / 2 ? 1 : 2;
      EXPECT_EQ(kernel->floats.kinds(x.data(), y.data(), n).n_not_finite, n_not_finite);
    }
  }
}

// Squares of these numbers are infinite or zero.
TEST(Difference, OfTheWholeRangeOfDoubles) {
  const auto expect_like_ones = [](double scale_a, double scale_b) {
    const std::vector<double> ones = {1, -2, 3, 0, 0.5};
    const std::vector<double> others = {1.5, -2, 2, 1, 0};
    std::vector<double> a;
    std::vector<double> b;
    for (const double each : ones) a.push_back(each * scale_a);
    for (const double each : others) b.push_back(each * scale_b);
    const Products plain = difference(Element::kFloat64, ones, others).products;
    const Products found = difference(Element::kFloat64, a, b).products;
    const double norms = std::sqrt(found.squares_a) * std::sqrt(found.squares_b);
    const double plain_norms = std::sqrt(plain.squares_a) * std::sqrt(plain.squares_b);
    EXPECT_NEAR(found.product / norms, plain.product / plain_norms, 1e-15);
    EXPECT_NEAR(std::ldexp(std::sqrt(found.squares_a), found.scale_a) / scale_a,
                std::sqrt(plain.squares_a), 1e-15);
    EXPECT_NEAR(std::ldexp(std::sqrt(found.squares_b), found.scale_b) / scale_b,
                std::sqrt(plain.squares_b), 1e-15);
  };
  for (const double scale_a : {0x1p1021, 0x1p500, 0x1p400, 1.0, 0x1p-500, 0x1p-1000}) {
    for (const double scale_b : {0x1p1021, 0x1p500, 0x1p400, 1.0, 0x1p-500, 0x1p-1000}) {
      SCOPED_TRACE(testing::Message() << scale_a << " " << scale_b);
      expect_like_ones(scale_a, scale_b);
    }
  }
}

// Blocks of all sizes, merged: the largest decide, and zeros nothing.
TEST(Difference, OfBlocksOfSeveralSizes) {
  const std::vector<double> sizes = {0, 1e-200, 0, 1, 1e300, 1e-200, 0};
  for (std::size_t n = 1; n <= sizes.size(); ++n) {
    std::vector<double> data;
    for (std::size_t i = 0; i < n; ++i) data.insert(data.end(), 2048, sizes[i]);
    const double largest = *std::max_element(data.begin(), data.end());
    const std::vector<double> other(data.size(), 1);
    const Products found = difference(Element::kFloat64, data, other).products;
    const Products same = difference(Element::kFloat64, data, data).products;
    const auto of_largest = static_cast<double>(std::ranges::count(data, largest));
    const double norm = largest * std::sqrt(largest == 0 ? 0 : of_largest);
    EXPECT_NEAR(std::ldexp(std::sqrt(found.squares_a), found.scale_a), norm, 1e-12 * norm);
    EXPECT_NEAR(std::ldexp(std::sqrt(same.squares_b), same.scale_b), norm, 1e-12 * norm);
    EXPECT_EQ(found.squares_b, static_cast<double>(data.size()));
  }
}

TEST(Difference, OfDistancesThatNoDoubleHolds) {
  const std::vector<double> a = {-1.5e308, 1, 2};
  const std::vector<double> b = {1.5e308, 1, 2.5};
  const Difference found = difference(Element::kFloat64, a, b, Tolerance{1.5, 0});
  EXPECT_EQ(found.max_abs, kInfinity);
  EXPECT_EQ(found.max_rel, 2);
  EXPECT_EQ(found.n_outside, 1U);
}

TEST(Difference, OfSubnormalNumbers) {
  constexpr double kTiny = std::numeric_limits<double>::denorm_min();
  const std::vector<double> a = {7 * kTiny, 3 * kTiny};
  const std::vector<double> b = {5 * kTiny, 2 * kTiny};
  const Difference found = difference(Element::kFloat64, a, b);
  EXPECT_EQ(found.max_rel, 0.5);
  EXPECT_EQ(found.max_abs, 2 * kTiny);
}

TEST(Difference, OfComplexNumbersOfAnySize) {
  const std::vector<double> a = {1e300, -1e300, 3e300, 0};
  const std::vector<double> b = {1e-300, -1e-300, 3e-300, 1e-300};
  const Products found = difference(Element::kComplex128, a, b).products;
  const double norms = std::sqrt(found.squares_a) * std::sqrt(found.squares_b);
  EXPECT_NEAR(found.product / norms, 11 / std::sqrt(11.0 * 12.0), 1e-15);
}

}  // namespace
}  // namespace ptsave
