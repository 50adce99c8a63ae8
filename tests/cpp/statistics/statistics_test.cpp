// Statistics against plain loops in long double, and the kernels against each other.
#include "core/statistics/statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "core/crc/crc32.h"
#include "core/statistics/kernels.h"

namespace ptsave {
namespace {

template <typename T>
std::vector<T> numbers(std::size_t n, double mean, double deviation) {
  std::mt19937 generator(7);
  std::normal_distribution<double> distribution(mean, deviation);
  std::vector<T> result(n);
  for (T& each : result) each = static_cast<T>(distribution(generator));
  return result;
}

// Of a format with one number, or several, in each element.
template <typename T>
Statistics statistics(Element element, const std::vector<T>& data) {
  return statistics_of(element, data.data(), data.size() * sizeof(T));
}

template <typename T>
void expect_same(const std::vector<T>& data, const Statistics& found) {
  long double sum = 0;
  for (const T x : data) sum += static_cast<long double>(x);
  const long double mean = sum / static_cast<long double>(data.size());
  long double squares = 0;
  for (const T x : data) {
    const long double distance = static_cast<long double>(x) - mean;
    squares += distance * distance;
  }
  const double deviation =
      static_cast<double>(std::sqrt(squares / static_cast<long double>(data.size() - 1)));
  EXPECT_EQ(found.n, data.size());
  EXPECT_NEAR(found.mean, static_cast<double>(mean), 1e-12 * (1 + std::abs(found.mean)));
  // The means of blocks are rounded, which counts where the deviation is small beside them.
  const double rounding = std::numeric_limits<double>::epsilon() * std::abs(found.mean);
  EXPECT_NEAR(found.standard_deviation(), deviation, 1e-9 * deviation + rounding);
  EXPECT_EQ(found.crc, crc32(0, data.data(), data.size() * sizeof(T)));
}

TEST(Statistics, OfManySizes) {
  for (const std::size_t n : {2U, 3U, 17U, 4095U, 4096U, 4097U, 8192U, 100'000U, 3'000'000U}) {
    const auto floats = numbers<float>(n, 3, 2);
    expect_same(floats, statistics(Element::kFloat32, floats));
    const auto doubles = numbers<double>(n, -3, 2);
    expect_same(doubles, statistics(Element::kFloat64, doubles));
  }
}

// Sums of squares in a naive way would have no digit left.
TEST(Statistics, OfADeviationThatIsSmallBesideTheMean) {
  const auto data = numbers<double>(1'000'000, 1e6, 1e-3);
  expect_same(data, statistics(Element::kFloat64, data));
}

// Numbers whose squares, or sums, are infinite or zero, beside those times a power of two.
TEST(Statistics, OfTheWholeRangeOfDoubles) {
  auto plain = numbers<double>(10'000, 1, 3);
  for (double& each : plain) each = std::clamp(each, -7.9, 7.9);
  for (const double unit : {0x1p1020, 0x1p600, 0x1p478, 1.0, 0x1p-401, 0x1p-600, 0x1p-900}) {
    SCOPED_TRACE(unit);
    std::vector<double> data(plain);
    for (double& each : data) each *= unit;
    const auto expect_near = [&](double found, double expected) {
      EXPECT_NEAR(found / unit, expected, 1e-12 * expected);
    };
    for (const Element element : {Element::kFloat64, Element::kComplex128}) {
      const Statistics expected = statistics(element, plain);
      const Statistics found = statistics(element, data);
      EXPECT_EQ(found.n_nan + found.n_inf, 0U);
      expect_near(found.mean, expected.mean);
      expect_near(found.imaginary_mean, expected.imaginary_mean);
      expect_near(found.standard_deviation(), expected.standard_deviation());
      // At the upper end it is more than a double holds.
      if (unit < 0x1p1000) expect_near(found.norm(), expected.norm());
    }
  }
}

TEST(Statistics, OfBlocksOfSeveralSizes) {
  const std::vector<double> sizes = {0, 1e-200, 0, 1, 1e300, 1e-200, 0};
  for (std::size_t n = 1; n <= sizes.size(); ++n) {
    std::vector<double> data;
    for (std::size_t i = 0; i < n; ++i) data.insert(data.end(), 4096, sizes[i]);
    const double largest = *std::max_element(data.begin(), data.end());
    const auto share = static_cast<double>(std::count(data.begin(), data.end(), largest)) /
                       static_cast<double>(data.size());
    const Statistics found = statistics(Element::kFloat64, data);
    const double deviation = largest * std::sqrt(share * (1 - share));
    const double size = static_cast<double>(data.size());
    EXPECT_NEAR(found.mean, largest * share, 1e-12 * largest);
    EXPECT_NEAR(found.standard_deviation(), deviation * std::sqrt(size / (size - 1)),
                1e-12 * largest);
    EXPECT_NEAR(found.norm(), largest * std::sqrt(share * size), 1e-10 * largest);
  }
}

TEST(Statistics, OfTheLargestDoubles) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  const Statistics found = statistics(Element::kFloat64, std::vector<double>(10'001, kLargest));
  EXPECT_EQ(found.mean, kLargest);
  EXPECT_EQ(found.standard_deviation(), 0);
  const std::vector<double> apart = {kLargest, -kLargest, 0, 0, 0, 0, 0, 0, 0};
  const Statistics other = statistics(Element::kFloat64, apart);
  EXPECT_EQ(other.mean, 0);
  EXPECT_NEAR(other.standard_deviation() / kLargest, 0.5, 1e-15);
  constexpr double kTiny = std::numeric_limits<double>::denorm_min();
  const Statistics smallest = statistics(Element::kFloat64, std::vector<double>{4 * kTiny, 0});
  EXPECT_EQ(smallest.mean, 2 * kTiny);
  EXPECT_EQ(smallest.standard_deviation(), 3 * kTiny);  // 2 * sqrt(2)
  EXPECT_EQ(smallest.norm(), 4 * kTiny);
}

void expect_identical(const Statistics& a, const Statistics& b) {
  const auto bits = [](double x) { return std::bit_cast<std::uint64_t>(x); };
  EXPECT_EQ(a.n, b.n);
  EXPECT_EQ(a.n_nan, b.n_nan);
  EXPECT_EQ(a.n_inf, b.n_inf);
  EXPECT_EQ(a.n_zero, b.n_zero);
  EXPECT_EQ(bits(a.mean), bits(b.mean));
  EXPECT_EQ(bits(a.imaginary_mean), bits(b.imaginary_mean));
  EXPECT_EQ(bits(a.squares), bits(b.squares));
  EXPECT_EQ(a.scale, b.scale);
  EXPECT_EQ(bits(a.min), bits(b.min));
  EXPECT_EQ(bits(a.max), bits(b.max));
  EXPECT_EQ(a.min_integer, b.min_integer);
  EXPECT_EQ(a.max_integer, b.max_integer);
  EXPECT_EQ(a.crc, b.crc);
}

// The last chunk first, by two threads, beside a copy; random bytes have NaN and infinity, too.
TEST(ChunkedStatistics, AreThoseOfOnePass) {
  std::mt19937 generator(3);
  std::vector<std::byte> bytes(1'500'016);
  for (std::byte& each : bytes) each = static_cast<std::byte>(generator());
  for (int element = 0; element <= static_cast<int>(Element::kFloat4E2M1Pair); ++element) {
    for (const std::size_t nbytes : {std::size_t{0}, std::size_t{16}, bytes.size() - 16}) {
      SCOPED_TRACE(testing::Message() << element << " " << nbytes);
      const auto kind = static_cast<Element>(element);
      std::vector<std::byte> copy(nbytes);
      ChunkedStatistics chunks(kind, bytes.data() + 1, nbytes, copy.data());
      const auto take = [&](std::size_t remainder) {
        for (std::size_t i = chunks.n_chunks(); i-- > 0;) {
          if (i % 2 == remainder) chunks.take(i);
        }
      };
      std::thread other(take, 1);
      take(0);
      other.join();
      expect_identical(chunks.result(), statistics_of(kind, bytes.data() + 1, nbytes));
      EXPECT_TRUE(std::equal(copy.begin(), copy.end(), bytes.begin() + 1));
    }
  }
}

TEST(Statistics, OfNothing) {
  const Statistics found = statistics_of(Element::kFloat32, nullptr, 0);
  EXPECT_EQ(found.n, 0U);
  EXPECT_EQ(found.norm(), 0);
  EXPECT_TRUE(std::isnan(found.standard_deviation()));
}

TEST(Statistics, CountWhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> data(10'000, 2);
  data[0] = kInfinity;
  data[1] = -kInfinity;
  data[5'000] = std::numeric_limits<float>::quiet_NaN();
  data[9'999] = -0.0F;
  const Statistics found = statistics(Element::kFloat32, data);
  EXPECT_EQ(found.n_inf, 2U);
  EXPECT_EQ(found.n_nan, 1U);
  EXPECT_EQ(found.n_zero, 1U);
  EXPECT_EQ(found.min, 0);
  EXPECT_EQ(found.max, 2);
  EXPECT_NEAR(found.mean, 2.0 * 9996 / 9997, 1e-12);
}

TEST(Statistics, KernelsAgree) {
  using namespace statistics_internal;
  const auto floats = numbers<float>(kBlockLength, 5, 1);
  const auto doubles = numbers<double>(kBlockLength, 5, 1);
  std::vector<std::uint16_t> halves(1 << 16);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> expected(halves.size());
  kMomentsKernels[0].from_half(halves.data(), halves.size(), expected.data());
  const Moments first = kMomentsKernels[0].floats.moments(floats.data(), floats.size());
  for (std::size_t i = 0; i < kNMomentsKernels; ++i) {
    const MomentsKernel& kernel = kMomentsKernels[i];
    if (!kernel.supported()) continue;
    SCOPED_TRACE(kernel.name);
    const Moments found = kernel.floats.moments(floats.data(), floats.size());
    EXPECT_EQ(found.min, first.min);
    EXPECT_EQ(found.max, first.max);
    EXPECT_NEAR(found.mean, first.mean, 1e-12);
    EXPECT_NEAR(kernel.doubles.moments(doubles.data(), doubles.size()).mean, 5, 0.1);
    std::vector<float> converted(halves.size());
    kernel.from_half(halves.data(), halves.size(), converted.data());
    EXPECT_EQ(std::memcmp(converted.data(), expected.data(), 4 * expected.size()), 0);
    EXPECT_EQ(kernel.floats.non_finite(converted.data(), 0x7C00).n_inf, 0U);
    const NonFinite others = kernel.floats.non_finite(converted.data(), converted.size());
    EXPECT_EQ(others.n_inf, 2U);
    EXPECT_EQ(others.n_nan, 2U * 1023U);
  }
}

TEST(Statistics, ExtremesOfWideIntegersAreExact) {
  const std::vector<std::int64_t> data = {(std::int64_t{1} << 62) + 1, -5, 3};
  const Statistics found = statistics(Element::kInt64, data);
  EXPECT_EQ(found.max_integer, data[0]);
  EXPECT_EQ(found.min_integer, -5);
}

TEST(Statistics, OfUnalignedMemory) {
  const auto data = numbers<float>(5'000, 0, 1);
  std::vector<std::byte> bytes(4 * data.size() + 1);
  std::memcpy(bytes.data() + 1, data.data(), 4 * data.size());
  expect_same(data, statistics_of(Element::kFloat32, bytes.data() + 1, 4 * data.size()));
}

}  // namespace
}  // namespace ptsave
