#include "core/statistics/statistics.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "core/crc/crc32.h"
#include "core/memory/buffer.h"
#include "core/statistics/elements.h"
#include "core/statistics/kernels.h"

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

constexpr Grid kFinest{52, -1022};
constexpr Grid kOfHalf{10, -14};
constexpr Grid kOfFloat{23, -126};

// In the order of Element.
constexpr std::array kFormats = {
    Format{8, Kind::kReal, kFinest},      // kFloat64
    Format{4, Kind::kReal, kOfFloat},     // kFloat32
    Format{2, Kind::kReal, kOfHalf},      // kFloat16
    Format{2, Kind::kReal, {7, -126}},    // kBFloat16
    Format{16, Kind::kComplex, kFinest},  // kComplex128
    Format{8, Kind::kComplex, kOfFloat},  // kComplex64
    Format{4, Kind::kComplex, kOfHalf},   // kComplex32
    Format{8, Kind::kInteger, kFinest},   // kInt64
    Format{8, Kind::kInteger, kFinest},   // kUInt64
    Format{4, Kind::kInteger, kFinest},   // kInt32
    Format{4, Kind::kInteger, kFinest},   // kUInt32
    Format{2, Kind::kInteger, kFinest},   // kInt16
    Format{2, Kind::kInteger, kFinest},   // kUInt16
    Format{1, Kind::kInteger, kFinest},   // kInt8
    Format{1, Kind::kInteger, kFinest},   // kUInt8
    Format{1, Kind::kInteger, kFinest},   // kBool
    Format{1, Kind::kReal, {3, -6}},      // kFloat8E4M3
    Format{1, Kind::kReal, {3, -7}},      // kFloat8E4M3Uz
    Format{1, Kind::kReal, {2, -14}},     // kFloat8E5M2
    Format{1, Kind::kReal, {2, -15}},     // kFloat8E5M2Uz
    Format{1, Kind::kReal, {0, -126}},    // kFloat8E8M0
    Format{1, Kind::kReal, {1, 0}},       // kFloat4E2M1Pair
};
static_assert(kFormats.size() == static_cast<std::size_t>(Element::kFloat4E2M1Pair) + 1);

}  // namespace

const Format& format_of(Element element) { return kFormats[static_cast<std::size_t>(element)]; }

const ByteValues& values_of(Element element) {
  // In the order of Element, from kInt8 on.
  static const std::array kValues = {
      tabulate([](unsigned byte) { return static_cast<double>(static_cast<std::int8_t>(byte)); }),
      tabulate([](unsigned byte) { return double{1} * byte; }),
      tabulate([](unsigned byte) { return byte != 0 ? 1.0 : 0.0; }),
      tabulate(SmallFloat{4, 3, 7, Specials::kLargest}),
      tabulate(SmallFloat{4, 3, 8, Specials::kMinusZero}),
      tabulate(SmallFloat{5, 2, 15, Specials::kIeee}),
      tabulate(SmallFloat{5, 2, 16, Specials::kMinusZero}),
      tabulate([](unsigned byte) {
        return byte == 0xFF ? std::numeric_limits<double>::quiet_NaN()
                            : std::ldexp(1.0, static_cast<int>(byte) - 127);
      })};
  constexpr auto kFirst = static_cast<std::size_t>(Element::kInt8);
  static_assert(kValues.size() == static_cast<std::size_t>(Element::kFloat4E2M1Pair) - kFirst);
  return kValues.at(static_cast<std::size_t>(element) - kFirst);
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

namespace ptsave {
namespace {

using namespace statistics_internal;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

constexpr std::size_t kPieceNbytes = std::size_t{32} << 10;
// Pieces and chunks are merged in order, so the result does not depend on the threads.
constexpr std::size_t kChunkNbytes = kCachePieceNbytes;

Statistics nothing() {
  Statistics result;
  result.min = kInfinity;
  result.max = -kInfinity;
  result.min_integer = std::numeric_limits<std::int64_t>::max();
  result.max_integer = std::numeric_limits<std::int64_t>::min();
  return result;
}

// The mean of some numbers, and the spread around it.
struct Center {
  double mean = 0;
  double imaginary_mean = 0;
  double squares = 0;  // see Statistics
  int scale = 0;
};

// The scale for numbers with this largest absolute value.  It keeps their squares from becoming
// infinite, and squares that matter from becoming zero.  The squares of zeros fit any scale.
int scale_of(double largest) {
  constexpr int kScale = 600;
  if (largest > 0x1p480) return kScale;
  return largest < 0x1p-400 ? -kScale : 0;
}

// Clamps a mean of a and b to their range, because rounding may put the mean outside.
double between(double a, double b, double mean) {
  return std::clamp(mean, std::min(a, b), std::max(a, b));
}

void add_scaled(Statistics& to, std::uint64_t n, const Center& more) {
  const int scale = to.n_finite() == 0 ? more.scale : std::max(to.scale, more.scale);
  const auto n_before = static_cast<double>(to.n_finite());
  const double weight = static_cast<double>(n) / (n_before + static_cast<double>(n));
  const double factor = std::ldexp(1, -scale);
  const double distance = more.mean * factor - to.mean * factor;
  const double imaginary = more.imaginary_mean * factor - to.imaginary_mean * factor;
  const double squares = std::ldexp(to.squares, 2 * (to.scale - scale)) +
                         std::ldexp(more.squares, 2 * (more.scale - scale));
  const auto merged = [&](double mean, double other, double apart) {
    return between(mean, other, std::ldexp(mean * factor + apart * weight, scale));
  };
  to.mean = merged(to.mean, more.mean, distance);
  to.imaginary_mean = merged(to.imaginary_mean, more.imaginary_mean, imaginary);
  to.squares = squares + (distance * distance + imaginary * imaginary) * (n_before * weight);
  to.scale = scale;
}

void add_center(Statistics& to, std::uint64_t n, const Center& more) {
  if (n == 0) return;
  if (to.scale != 0 || more.scale != 0) {
    add_scaled(to, n, more);
    return;
  }
  const auto n_before = static_cast<double>(to.n_finite());
  const auto n_more = static_cast<double>(n);
  const double weight = n_more / (n_before + n_more);
  const double distance = more.mean - to.mean;
  const double imaginary = more.imaginary_mean - to.imaginary_mean;
  to.mean += distance * weight;
  to.imaginary_mean += imaginary * weight;
  to.squares += more.squares + (distance * distance + imaginary * imaginary) * (n_before * weight);
}

void merge(Statistics& to, const Statistics& from, std::uint64_t from_nbytes) {
  add_center(to, from.n_finite(), {from.mean, from.imaginary_mean, from.squares, from.scale});
  to.n += from.n;
  to.n_nan += from.n_nan;
  to.n_inf += from.n_inf;
  to.n_zero += from.n_zero;
  to.min = std::min(to.min, from.min);
  to.max = std::max(to.max, from.max);
  to.min_integer = std::min(to.min_integer, from.min_integer);
  to.max_integer = std::max(to.max_integer, from.max_integer);
  to.crc = crc32_combine(to.crc, from.crc, from_nbytes);
}

// ------------------------------------------------------------- numbers of at least two bytes

double largest_of(const Moments& moments) {
  return std::max(std::abs(moments.min), std::abs(moments.max));
}

// Computes the center in units of 2^scale.
Center scaled_center_of(const Moments& moments, const double* data, std::size_t n, int scale) {
  if (largest_of(moments) == 0) return {0, 0, 0, scale};
  const double factor = std::ldexp(1, -scale);
  std::array<double, kBlockLength> numbers;
  for (std::size_t i = 0; i < n; ++i) numbers[i] = data[i] * factor;
  const Moments found = moments_loops<double>().moments(numbers.data(), n);
  const double mean = std::ldexp(between(found.min, found.max, found.mean), scale);
  return {between(moments.min, moments.max, mean), 0, found.squares, scale};
}

template <typename Number>
Center center_of(const Moments& moments, const Number* data, std::size_t n) {
  if constexpr (std::is_same_v<Number, double>) {
    const int scale = scale_of(largest_of(moments));
    if (scale != 0) return scaled_center_of(moments, data, n, scale);
  }
  return {moments.mean, 0, moments.squares, 0};
}

template <typename Number>
void add_finite(Statistics& to, const Number* data, std::size_t n) {
  if (n == 0) return;
  const Moments moments = moments_loops<Number>().moments(data, n);
  add_center(to, n, center_of(moments, data, n));
  to.n += n;
  to.n_zero += moments.n_zero;
  to.min = std::min(to.min, moments.min);
  to.max = std::max(to.max, moments.max);
}

template <typename Number>
void add_numbers(Statistics& to, const Number* data, std::size_t n) {
  const NonFinite others = moments_loops<Number>().non_finite(data, n);
  if (others.n_nan + others.n_inf == 0) {
    add_finite(to, data, n);
    return;
  }
  std::array<Number, kBlockLength> finite;
  std::size_t n_finite = 0;
  for (std::size_t i = 0; i < n; ++i) {
    finite[n_finite] = data[i];
    n_finite += std::isfinite(data[i]) ? 1U : 0U;
  }
  add_finite(to, finite.data(), n_finite);
  to.n += others.n_nan + others.n_inf;
  to.n_nan += others.n_nan;
  to.n_inf += others.n_inf;
}

template <typename From, typename To>
constexpr bool kIsReady = std::is_same_v<From, To>;

// Converts elements and calls `add` with each block of numbers.
template <typename From, typename To, typename Add>
void for_each_block(const std::byte* data, std::size_t nbytes, std::size_t element_nbytes,
                    const Add& add) {
  const bool aligned = std::bit_cast<std::uintptr_t>(data) % alignof(To) == 0;
  const std::size_t n = nbytes / element_nbytes;
  for (std::size_t begin = 0; begin < n; begin += kBlockLength) {
    const std::size_t length = std::min(kBlockLength, n - begin);
    const std::byte* const block = data + begin * element_nbytes;
    if (kIsReady<From, To> && aligned) {
      add(reinterpret_cast<const To*>(block), length);
      continue;
    }
    std::array<To, kBlockLength> numbers;
    convert<From>(block, length, numbers.data());
    add(numbers.data(), length);
  }
}

template <typename From, typename To>
void add_reals(Statistics& to, const std::byte* data, std::size_t nbytes,
               std::size_t element_nbytes) {
  for_each_block<From, To>(data, nbytes, element_nbytes, [&](const To* numbers, std::size_t n) {
    if constexpr (std::is_integral_v<From>) {
      add_finite(to, numbers, n);
    } else {
      add_numbers(to, numbers, n);
    }
  });
}

// Adds 64-bit integers; Flip inverts the highest bit of unsigned ones.
template <typename Integer, std::uint64_t Flip>
void add_wide_integers(Statistics& to, const std::byte* data, std::size_t nbytes) {
  add_reals<Integer, double>(to, data, nbytes, sizeof(Integer));
  std::int64_t low = to.min_integer;
  std::int64_t high = to.max_integer;
  for (std::size_t i = 0; i < nbytes; i += sizeof(Integer)) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, data + i, sizeof bits);
    const auto element = static_cast<std::int64_t>(bits ^ Flip);
    low = std::min(low, element);
    high = std::max(high, element);
  }
  to.min_integer = low;
  to.max_integer = high;
}

// ------------------------------------------------------------------------------ complex numbers

template <typename Number>
void add_complex_block(Statistics& to, const Number* data, std::size_t n) {
  std::array<double, kBlockLength / 2> real;
  std::array<double, kBlockLength / 2> imaginary;
  std::size_t n_finite = 0;
  for (std::size_t i = 0; i < n; i += 2) {
    const auto x = static_cast<double>(data[i]);
    const auto y = static_cast<double>(data[i + 1]);
    real[n_finite] = x;
    imaginary[n_finite] = y;
    if (std::isfinite(x) && std::isfinite(y)) {
      ++n_finite;
    } else if (std::isnan(x) || std::isnan(y)) {
      ++to.n_nan, ++to.n;
    } else {
      ++to.n_inf, ++to.n;
    }
  }
  if (n_finite == 0) return;
  for (std::size_t i = 0; i < n_finite; ++i) {
    const double magnitude = std::hypot(real[i], imaginary[i]);
    to.n_zero += magnitude == 0 ? 1 : 0;
    to.min = std::min(to.min, magnitude);
    to.max = std::max(to.max, magnitude);
  }
  const Moments x = moments_loops<double>().moments(real.data(), n_finite);
  const Moments y = moments_loops<double>().moments(imaginary.data(), n_finite);
  const int scale = scale_of(std::max(largest_of(x), largest_of(y)));
  if (scale == 0) {
    add_center(to, n_finite, {x.mean, y.mean, x.squares + y.squares, 0});
  } else {
    const Center a = scaled_center_of(x, real.data(), n_finite, scale);
    const Center b = scaled_center_of(y, imaginary.data(), n_finite, scale);
    add_center(to, n_finite, {a.mean, b.mean, a.squares + b.squares, scale});
  }
  to.n += n_finite;
}

template <typename From, typename To>
void add_complex(Statistics& to, const std::byte* data, std::size_t nbytes,
                 std::size_t part_nbytes) {
  for_each_block<From, To>(data, nbytes, part_nbytes, [&](const To* numbers, std::size_t n) {
    add_complex_block(to, numbers, n);
  });
}

// ------------------------------------------------------------------------- elements of one byte

// Four tables, because with one table equal neighbours would wait for each other.
std::array<std::uint64_t, 256> count_bytes(const std::byte* data, std::size_t nbytes) {
  std::array<std::array<std::uint32_t, 256>, 4> counts{};
  std::size_t i = 0;
  for (; i + 4 <= nbytes; i += 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, data + i, sizeof word);
    ++counts[0][word & 0xFF];
    ++counts[1][(word >> 8) & 0xFF];
    ++counts[2][(word >> 16) & 0xFF];
    ++counts[3][word >> 24];
  }
  for (; i < nbytes; ++i) ++counts[0][std::to_integer<std::size_t>(data[i])];
  std::array<std::uint64_t, 256> sums{};
  for (std::size_t byte = 0; byte < sums.size(); ++byte) {
    for (const auto& table : counts) sums[byte] += table[byte];
  }
  return sums;
}

void add_repeated(Statistics& to, double value, std::uint64_t n) {
  if (n == 0) return;
  if (std::isfinite(value)) {
    add_center(to, n, {value, 0, 0, 0});
    to.n_zero += value == 0 ? n : 0;
    to.min = std::min(to.min, value);
    to.max = std::max(to.max, value);
  }
  to.n += n;
  to.n_nan += std::isnan(value) ? n : 0;
  to.n_inf += std::isinf(value) ? n : 0;
}

void add_bytes(Statistics& to, const std::byte* data, std::size_t nbytes,
               const ByteValues& values) {
  const std::array<std::uint64_t, 256> counts = count_bytes(data, nbytes);
  for (std::size_t byte = 0; byte < counts.size(); ++byte) {
    add_repeated(to, values[byte], counts[byte]);
  }
}

void add_nibbles(Statistics& to, const std::byte* data, std::size_t nbytes) {
  const std::array<std::uint64_t, 256> counts = count_bytes(data, nbytes);
  for (unsigned byte = 0; byte < counts.size(); ++byte) {
    add_repeated(to, kFloat4E2M1(byte & 0xF), counts[byte]);
    add_repeated(to, kFloat4E2M1(byte >> 4), counts[byte]);
  }
}

// ------------------------------------------------------------------------------------ all of them

void add_elements(Statistics& to, Element element, const std::byte* data, std::size_t nbytes) {
  constexpr std::uint64_t kHighestBit = std::uint64_t{1} << 63;
  switch (element) {
    case Element::kFloat64:
      return add_reals<double, double>(to, data, nbytes, 8);
    case Element::kFloat32:
      return add_reals<float, float>(to, data, nbytes, 4);
    case Element::kFloat16:
      return add_reals<Half, float>(to, data, nbytes, 2);
    case Element::kBFloat16:
      return add_reals<BFloat16, float>(to, data, nbytes, 2);
    case Element::kComplex128:
      return add_complex<double, double>(to, data, nbytes, 8);
    case Element::kComplex64:
      return add_complex<float, float>(to, data, nbytes, 4);
    case Element::kComplex32:
      return add_complex<Half, float>(to, data, nbytes, 2);
    case Element::kInt64:
      return add_wide_integers<std::int64_t, 0>(to, data, nbytes);
    case Element::kUInt64:
      return add_wide_integers<std::uint64_t, kHighestBit>(to, data, nbytes);
    case Element::kInt32:
      return add_reals<std::int32_t, double>(to, data, nbytes, 4);
    case Element::kUInt32:
      return add_reals<std::uint32_t, double>(to, data, nbytes, 4);
    case Element::kInt16:
      return add_reals<std::int16_t, float>(to, data, nbytes, 2);
    case Element::kUInt16:
      return add_reals<std::uint16_t, float>(to, data, nbytes, 2);
    case Element::kFloat4E2M1Pair:
      return add_nibbles(to, data, nbytes);
    default:
      return add_bytes(to, data, nbytes, values_of(element));
  }
}

Statistics statistics_of_chunk(Element element, const std::byte* data, std::size_t nbytes) {
  Statistics result = nothing();
  // Elements of one byte are counted in larger pieces, because each piece evaluates a table of 256
  // values.
  const std::size_t piece_nbytes = nbytes_of(element) == 1 ? kCachePieceNbytes : kPieceNbytes;
  for (std::size_t begin = 0; begin < nbytes; begin += piece_nbytes) {
    const std::size_t length = std::min(piece_nbytes, nbytes - begin);
    result.crc = crc32(result.crc, data + begin, length);
    add_elements(result, element, data + begin, length);
  }
  return result;
}

}  // namespace

std::size_t nbytes_of(Element element) { return format_of(element).nbytes; }

double Statistics::standard_deviation() const {
  if (n_finite() < 2) return kNan;
  return std::ldexp(std::sqrt(squares / static_cast<double>(n_finite() - 1)), scale);
}

// The sum of squares is the sum of squared distances from the mean, plus n times the mean's square:
// no digits are lost.
double Statistics::norm() const {
  const double factor = std::ldexp(1, -scale);
  const double real = mean * factor;
  const double imaginary = imaginary_mean * factor;
  const double mean_squares = real * real + imaginary * imaginary;
  return std::ldexp(std::sqrt(squares + static_cast<double>(n_finite()) * mean_squares), scale);
}

Statistics statistics_of(Element element, const void* data, std::size_t nbytes) {
  ChunkedStatistics chunks(element, static_cast<const std::byte*>(data), nbytes);
  for (std::size_t i = 0; i < chunks.n_chunks(); ++i) chunks.take(i);
  return chunks.result();
}

ChunkedStatistics::ChunkedStatistics(Element element, const std::byte* data, std::size_t nbytes,
                                     std::byte* copy)
    : element_(element),
      data_(data),
      nbytes_(nbytes),
      copy_(copy),
      parts_((nbytes + kChunkNbytes - 1) / kChunkNbytes) {
  if (nbytes % nbytes_of(element) != 0) throw std::invalid_argument("an element is incomplete");
}

void ChunkedStatistics::take(std::size_t chunk) {
  const std::size_t begin = chunk * kChunkNbytes;
  if (copy_ != nullptr) stream_copy(copy_ + begin, data_ + begin, length_of(chunk));
  parts_[chunk] = statistics_of_chunk(element_, data_ + begin, length_of(chunk));
}

Statistics ChunkedStatistics::result() const {
  Statistics result = nothing();
  for (std::size_t i = 0; i < parts_.size(); ++i) merge(result, parts_[i], length_of(i));
  return result;
}

std::size_t ChunkedStatistics::length_of(std::size_t chunk) const {
  return std::min(kChunkNbytes, nbytes_ - chunk * kChunkNbytes);
}

}  // namespace ptsave
