#include "core/statistics/difference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "core/statistics/elements.h"
#include "core/statistics/kernels.h"

namespace ptsave {
namespace {

using namespace statistics_internal;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Chunks are merged in order, so the result does not depend on the threads.
constexpr std::size_t kChunkLength = std::size_t{1} << 18;
// Starting threads takes as long as some 100,000 elements.
constexpr std::size_t kLengthOfThreads = std::size_t{1} << 20;

// ------------------------------------------------------------------------------------- formats

// The type of number in which two formats are compared.
enum class Numbers { kFloats, kDoubles, kIntegers, kComplex };

bool fits_float(Element element) {
  return element != Element::kFloat64 &&
         (format_of(element).kind != Kind::kInteger || nbytes_of(element) <= sizeof(std::int16_t));
}

Numbers numbers_of(Element a, Element b) {
  const Kind kind_a = format_of(a).kind;
  const Kind kind_b = format_of(b).kind;
  if (kind_a == Kind::kComplex || kind_b == Kind::kComplex) return Numbers::kComplex;
  if (kind_a == Kind::kInteger && kind_b == Kind::kInteger) return Numbers::kIntegers;
  return fits_float(a) && fits_float(b) ? Numbers::kFloats : Numbers::kDoubles;
}

// The coarser of two grids: the grid with fewer bits of mantissa.
Grid coarser(Grid a, Grid b) {
  if (a.mantissa_nbits != b.mantissa_nbits) return a.mantissa_nbits < b.mantissa_nbits ? a : b;
  return a.min_exponent > b.min_exponent ? a : b;
}

// --------------------------------------------------------------------------- blocks of elements

std::size_t nbytes_of(Element element, std::size_t n) {
  return element == Element::kFloat4E2M1Pair ? n / 2 : n * nbytes_of(element);
}

// A block: its first number's index, its length, and its place on both sides.
struct Span {
  std::size_t begin;
  std::size_t n;
  const std::byte* a;
  const std::byte* b;
};

// Two rows of elements, and how to compare them.
struct Rows {
  Element element_a;
  Element element_b;
  const std::byte* a;
  const std::byte* b;
  Tolerance tolerance;
  Numbers numbers;
  Grid grid;

  Span span(std::size_t begin, std::size_t n) const {
    return {begin, n, a + nbytes_of(element_a, begin), b + nbytes_of(element_b, begin)};
  }
};

// The numbers of a block: used in place if possible, else converted.
template <typename Number>
class Block {
 public:
  Block(Element element, const std::byte* data, std::size_t n) {
    constexpr Element kReady = sizeof(Number) == 4 ? Element::kFloat32 : Element::kFloat64;
    const bool aligned = std::bit_cast<std::uintptr_t>(data) % alignof(Number) == 0;
    if (std::is_floating_point_v<Number> && element == kReady && aligned) {
      numbers_ = reinterpret_cast<const Number*>(data);
      return;
    }
    read(element, data, n, buffer_.data());
    numbers_ = buffer_.data();
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const Number* numbers() const { return numbers_; }

 private:
  std::array<Number, kPairsLength> buffer_;
  const Number* numbers_;
};

// ------------------------------------------------------------------------------- equal elements

template <typename Bits>
std::size_t count_different(const std::byte* a, const std::byte* b, std::size_t n) {
  std::uint32_t count = 0;
  for (std::size_t i = 0; i < n; ++i) {
    Bits x;
    Bits y;
    std::memcpy(&x, a + i * sizeof x, sizeof x);
    std::memcpy(&y, b + i * sizeof y, sizeof y);
    count += x != y ? 1U : 0U;
  }
  return count;
}

struct Bits128 {
  std::uint64_t low;
  std::uint64_t high;
  bool operator==(const Bits128&) const = default;
};

std::size_t count_nibbles(const std::byte* a, const std::byte* b, std::size_t nbytes) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < nbytes; ++i) {
    const auto others = std::to_integer<unsigned>(a[i] ^ b[i]);
    count += ((others & 0xF) != 0 ? 1U : 0U) + (others > 0xF ? 1U : 0U);
  }
  return count;
}

std::size_t count_different(Element element, const std::byte* a, const std::byte* b,
                            std::size_t n) {
  if (std::memcmp(a, b, nbytes_of(element, n)) == 0) return 0;
  if (element == Element::kFloat4E2M1Pair) return count_nibbles(a, b, n / 2);
  switch (nbytes_of(element)) {
    case 1:
      return count_different<std::uint8_t>(a, b, n);
    case 2:
      return count_different<std::uint16_t>(a, b, n);
    case 4:
      return count_different<std::uint32_t>(a, b, n);
    case 8:
      return count_different<std::uint64_t>(a, b, n);
    default:
      return count_different<Bits128>(a, b, n);
  }
}

std::size_t first_different(Element element, const std::byte* a, const std::byte* b) {
  std::size_t i = 0;
  while (a[i] == b[i]) ++i;
  if (element != Element::kFloat4E2M1Pair) return i / nbytes_of(element);
  return 2 * i + (std::to_integer<unsigned>(a[i] ^ b[i]) % 16 == 0 ? 1 : 0);
}

// Adds numbers that differ; `first` returns the first one's index.
template <typename First>
void add_different(Difference& to, std::size_t count, const First& first) {
  if (count == 0) return;
  if (to.n_different == 0) to.first_different = first();
  to.n_different += count;
}

// Adds numbers that differ in a block that begins at index `begin`.
template <typename Differs>
void add_different(Difference& to, std::size_t count, std::size_t begin, const Differs& differs) {
  add_different(to, count, [&] {
    std::size_t i = 0;
    while (!differs(i)) ++i;
    return begin + i;
  });
}

// Adds a block of two formats, whose numbers are compared by value.
template <typename Differs>
void add_values(Difference& to, std::size_t begin, std::size_t n, const Differs& differs) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < n; ++i) count += differs(i) ? 1U : 0U;
  add_different(to, count, begin, differs);
}

// ----------------------------------------------------------------------------------- real numbers

// The scale for numbers with this unscaled sum of squares.  With this scale, the squares of all
// numbers that matter beside the largest neither become infinite nor lose digits, even summed over
// many blocks.
int scale_of(double squares) {
  constexpr int kScale = 600;
  if (!(squares <= 0x1p960)) return kScale;
  return squares < 0x1p-800 ? -kScale : 0;
}

void copy_scaled(const double* data, std::size_t n, int scale, double* result) {
  const double factor = std::ldexp(1, -scale);
  for (std::size_t i = 0; i < n; ++i) result[i] = data[i] * factor;
}

double rescaled(double sum, int scale) { return scale == 0 ? sum : std::ldexp(sum, scale); }

// The common scale of two sums of squares; a zero sum fits any scale.
int common_scale(double squares, int scale, double more, int scale_of_more) {
  if (squares == 0) return scale_of_more;
  return more == 0 ? scale : std::max(scale, scale_of_more);
}

void add(Products& to, const Products& from) {
  const int a = common_scale(to.squares_a, to.scale_a, from.squares_a, from.scale_a);
  const int b = common_scale(to.squares_b, to.scale_b, from.squares_b, from.scale_b);
  to.product = rescaled(to.product, to.scale_a - a + to.scale_b - b) +
               rescaled(from.product, from.scale_a - a + from.scale_b - b);
  to.squares_a = rescaled(to.squares_a, 2 * (to.scale_a - a)) +
                 rescaled(from.squares_a, 2 * (from.scale_a - a));
  to.squares_b = rescaled(to.squares_b, 2 * (to.scale_b - b)) +
                 rescaled(from.squares_b, 2 * (from.scale_b - b));
  to.scale_a = a;
  to.scale_b = b;
}

Products scaled_products_of(const double* a, const double* b, std::size_t n, int scale_a,
                            int scale_b) {
  std::array<double, 2 * kPairsLength> x;
  std::array<double, 2 * kPairsLength> y;
  copy_scaled(a, n, scale_a, x.data());
  copy_scaled(b, n, scale_b, y.data());
  const Distances found = distances_loops<double>().distances(x.data(), y.data(), n, {}, 0);
  return {found.product, found.squares_a, found.squares_b, scale_a, scale_b};
}

// The products of a block, or of a block's complex parts, whose unscaled sums are in `found`.
template <typename Number>
Products products_of(const Distances& found, const Number* a, const Number* b, std::size_t n) {
  if constexpr (std::is_same_v<Number, double>) {
    const int scale_a = scale_of(found.squares_a);
    const int scale_b = scale_of(found.squares_b);
    if (scale_a != 0 || scale_b != 0) return scaled_products_of(a, b, n, scale_a, scale_b);
  }
  return {found.product, found.squares_a, found.squares_b};
}

Products products_of(const double* a, const double* b, std::size_t n) {
  return products_of(distances_loops<double>().distances(a, b, n, {}, 0), a, b, n);
}

// The products of numbers that are equal on both sides.
template <typename Number>
Products squares_of_same(const Number* data, std::size_t n) {
  const double squares = distances_loops<Number>().squares(data, n);
  if constexpr (std::is_same_v<Number, double>) {
    if (scale_of(squares) != 0) return products_of(data, data, n);
  }
  return {squares, squares, squares};
}

// A quarter of the distance of two numbers, because the distance may exceed any double.
double quarter_distance(double x, double y) { return std::abs(x / 4 - y / 4); }

// Adds n_outside and max_rel of a block in which distances exceed any double.
void add_far(Difference& to, const Tolerance& tolerance, const double* a, const double* b,
             std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const double distance = std::abs(a[i] - b[i]);
    const double size = std::abs(b[i]);
    if (std::isfinite(distance)) {
      to.n_outside += tolerance.allows(distance, size) ? 0U : 1U;
      to.max_rel = std::max(to.max_rel, distance > 0 ? distance / size : 0);
      continue;
    }
    const double quarter = quarter_distance(a[i], b[i]);
    const Tolerance quartered{tolerance.relative, tolerance.absolute / 4};
    to.n_outside += quartered.allows(quarter, size / 4) ? 0U : 1U;
    to.max_rel = std::max(to.max_rel, quarter / (size / 4));
  }
}

template <typename Number>
void add_distances(Difference& to, const Tolerance& tolerance, const Number* a, const Number* b,
                   std::size_t n) {
  const DistancesLoops<Number>& loops = distances_loops<Number>();
  const Distances found = loops.distances(a, b, n, tolerance, to.max_rel);
  const Products products = products_of(found, a, b, n);
  add(to.products, products);
  to.max_abs = std::max(to.max_abs, found.max_abs);
  if constexpr (std::is_same_v<Number, double>) {
    if (found.max_abs > std::numeric_limits<double>::max()) {
      add_far(to, tolerance, a, b, n);
      return;
    }
  }
  to.n_outside += found.n_outside;
  // The product of a ratio and a tiny number is rounded to few digits.
  const bool may_be_larger = found.has_larger_ratio || products.scale_b < 0;
  if (may_be_larger && to.max_rel < kInfinity) {
    to.max_rel = std::max(to.max_rel, loops.largest_ratio(a, b, n));
  }
}

template <typename Number>
void add_finite(Difference& to, const Rows& rows, const Number* a, const Number* b, std::size_t n) {
  if (n == 0) return;
  add_distances(to, rows.tolerance, a, b, n);
  std::array<std::uint8_t, kPairsLength> ulps;
  distances_loops<Number>().ulps(a, b, n, rows.grid, ulps.data());
  distances_kernel().count_ulps(ulps.data(), n, to.ulps.data());
}

struct Special {
  bool is_nan;
  bool is_inf;
};

void count_special(Difference& to, Special a, Special b) {
  to.n_nan_a += a.is_nan ? 1 : 0;
  to.n_nan_b += b.is_nan ? 1 : 0;
  to.n_inf_a += a.is_inf ? 1 : 0;
  to.n_inf_b += b.is_inf ? 1 : 0;
}

// Adds a pair with a number that is not finite; `same` means two equal infinities.  The distance is
// finite for complex numbers with the same infinite part.
void add_special(Difference& to, Special a, Special b, bool same, double distance = kInfinity) {
  count_special(to, a, b);
  if ((a.is_nan && b.is_nan) || (!a.is_nan && !b.is_nan && same)) {
    ++to.ulps[0];
    return;
  }
  ++to.ulps[kNoUlps];
  ++to.n_outside;
  if (a.is_nan || b.is_nan) {
    to.n_nan_only_a += a.is_nan ? 1 : 0;
    to.n_nan_only_b += b.is_nan ? 1 : 0;
    return;
  }
  ++to.n_inf_mismatch;
  to.max_abs = std::max(to.max_abs, distance);
  if (distance == kInfinity) to.max_rel = kInfinity;
}

template <typename Number>
Special special(Number x) {
  return {std::isnan(x), std::isinf(x)};
}

template <typename Number>
bool values_differ(Number a, Number b) {
  return !(a == b) && !(std::isnan(a) && std::isnan(b));
}

template <typename Number>
void add_reals(Difference& to, const Rows& rows, std::size_t begin, const Number* a,
               const Number* b, std::size_t n) {
  const PairKinds kinds = distances_loops<Number>().kinds(a, b, n);
  const bool are_finite = kinds.n_not_finite == 0;
  if (rows.element_a != rows.element_b && (kinds.n_different != 0 || !are_finite)) {
    const auto differs = [&](std::size_t i) { return values_differ(a[i], b[i]); };
    if (are_finite) {
      add_different(to, kinds.n_different, begin, differs);
    } else {
      add_values(to, begin, n, differs);
    }
  }
  if (are_finite) {
    add_finite(to, rows, a, b, n);
    return;
  }
  std::array<Number, kPairsLength> x;
  std::array<Number, kPairsLength> y;
  std::size_t n_finite = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (std::isfinite(a[i]) && std::isfinite(b[i])) {
      x[n_finite] = a[i];
      y[n_finite++] = b[i];
    } else {
      add_special(to, special(a[i]), special(b[i]), a[i] == b[i]);
    }
  }
  add_finite(to, rows, x.data(), y.data(), n_finite);
}

template <typename Number>
void add_squares(Difference& to, const Number* data, std::size_t n) {
  add(to.products, squares_of_same(data, n));
}

// Adds a block whose bytes are equal on both sides.
template <typename Number>
void add_same(Difference& to, const Number* data, std::size_t n) {
  to.ulps[0] += n;
  const NonFinite others = moments_loops<Number>().non_finite(data, n);
  if (others.n_nan + others.n_inf == 0) {
    add_squares(to, data, n);
    return;
  }
  to.n_nan_a += others.n_nan;
  to.n_nan_b += others.n_nan;
  to.n_inf_a += others.n_inf;
  to.n_inf_b += others.n_inf;
  std::array<Number, kPairsLength> finite;
  const auto end =
      std::copy_if(data, data + n, finite.begin(), [](Number x) { return std::isfinite(x); });
  add_squares(to, finite.data(), static_cast<std::size_t>(end - finite.begin()));
}

template <typename Number>
void add_real_block(Difference& to, const Rows& rows, const Span& span, bool same) {
  const Block<Number> block_a(rows.element_a, span.a, span.n);
  const Number* const a = block_a.numbers();
  if (same) {
    add_same(to, a, span.n);
    return;
  }
  const Block<Number> block_b(rows.element_b, span.b, span.n);
  const Number* const b = block_b.numbers();
  add_reals(to, rows, span.begin, a, b, span.n);
}

// --------------------------------------------------------------------------------- whole numbers

// A signed or unsigned integer of at most 64 bits.
struct Integer {
  bool is_negative;
  std::uint64_t magnitude;

  Integer(std::int64_t bits, bool is_unsigned)
      : is_negative(!is_unsigned && bits < 0),
        magnitude(is_negative ? -static_cast<std::uint64_t>(bits)
                              : static_cast<std::uint64_t>(bits)) {}
  double value() const {
    const auto size = static_cast<double>(magnitude);
    return is_negative ? -size : size;
  }
};

WholeDistance distance_of(Integer a, Integer b) {
  const auto [less, more] = std::minmax(a.magnitude, b.magnitude);
  if (a.is_negative == b.is_negative) return {false, more - less};
  return {more + less < more, more + less};
}

double value_of(const WholeDistance& distance) {
  return static_cast<double>(distance.low) + (distance.overflows ? 0x1p64 : 0);
}

std::size_t bucket_of(const WholeDistance& distance) {
  if (distance.overflows || distance.low > std::uint64_t{1} << 63) return kNoUlps;
  if (distance.low < 2) return distance.low;
  return static_cast<std::size_t>(std::bit_width(distance.low - 1)) + 1;
}

void add_integers(Difference& to, const Rows& rows, Integer a, Integer b) {
  const double x = a.value();
  const double y = b.value();
  add(to.products, {x * y, x * x, y * y});
  const WholeDistance distance = distance_of(a, b);
  ++to.ulps[bucket_of(distance)];
  if (distance == WholeDistance{}) return;
  const double size = value_of(distance);
  if (!rows.tolerance.allows(size, y)) ++to.n_outside;
  to.max_abs = std::max(to.max_abs, size);
  to.max_rel = std::max(to.max_rel, size / std::abs(y));
  to.max_abs_integer = std::max(to.max_abs_integer, distance);
}

// Adds whole numbers whose distances a Number holds exactly.
template <typename Number>
void add_whole(Difference& to, const Rows& rows, std::size_t begin, const Number* a,
               const Number* b, std::size_t n, bool same) {
  if (same) {
    to.ulps[0] += n;
    add_squares(to, a, n);
    return;
  }
  Difference found;
  found.max_rel = to.max_rel;
  add_distances(found, rows.tolerance, a, b, n);
  add(to.products, found.products);
  to.n_outside += found.n_outside;
  to.max_rel = found.max_rel;
  to.max_abs = std::max(to.max_abs, found.max_abs);
  const WholeDistance largest{false, static_cast<std::uint64_t>(found.max_abs)};
  to.max_abs_integer = std::max(to.max_abs_integer, largest);
  std::array<std::uint8_t, kPairsLength> ulps;
  distances_loops<Number>().ulps_of_integers(a, b, n, ulps.data());
  distances_kernel().count_ulps(ulps.data(), n, to.ulps.data());
  if (rows.element_a == rows.element_b) return;
  add_values(to, begin, n, [&](std::size_t i) { return ulps[i] != 0; });
}

template <typename Number>
void add_whole_block(Difference& to, const Rows& rows, const Span& span, bool same) {
  const Block<Number> a(rows.element_a, span.a, span.n);
  if (same) {
    add_whole(to, rows, span.begin, a.numbers(), a.numbers(), span.n, true);
    return;
  }
  const Block<Number> b(rows.element_b, span.b, span.n);
  add_whole(to, rows, span.begin, a.numbers(), b.numbers(), span.n, false);
}

// 64-bit integers as doubles, if all are small enough for exact values and distances.
class SmallIntegers {
 public:
  SmallIntegers(const std::int64_t* data, std::size_t n, bool is_unsigned) {
    constexpr std::uint64_t kLimit = std::uint64_t{1} << 52;
    const std::uint64_t offset = is_unsigned ? 0 : kLimit;
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < n; ++i) bits |= static_cast<std::uint64_t>(data[i]) + offset;
    are_small_ = bits < kLimit + offset;
    if (are_small_) std::copy_n(data, n, numbers_.begin());
  }
  bool are_small() const { return are_small_; }
  const double* numbers() const { return numbers_.data(); }

 private:
  std::array<double, kPairsLength> numbers_;
  bool are_small_;
};

void add_wide_integer_block(Difference& to, const Rows& rows, const Span& span, bool same) {
  const bool a_is_unsigned = rows.element_a == Element::kUInt64;
  const bool b_is_unsigned = rows.element_b == Element::kUInt64;
  const Block<std::int64_t> block_a(rows.element_a, span.a, span.n);
  const Block<std::int64_t> block_b(rows.element_b, span.b, span.n);
  const SmallIntegers small_a(block_a.numbers(), span.n, a_is_unsigned);
  const SmallIntegers small_b(block_b.numbers(), span.n, b_is_unsigned);
  if (small_a.are_small() && small_b.are_small()) {
    add_whole(to, rows, span.begin, small_a.numbers(), small_b.numbers(), span.n, same);
    return;
  }
  const auto a = [&](std::size_t i) { return Integer(block_a.numbers()[i], a_is_unsigned); };
  const auto b = [&](std::size_t i) { return Integer(block_b.numbers()[i], b_is_unsigned); };
  for (std::size_t i = 0; i < span.n; ++i) add_integers(to, rows, a(i), b(i));
  if (rows.element_a == rows.element_b) return;
  add_values(to, span.begin, span.n,
             [&](std::size_t i) { return distance_of(a(i), b(i)) != WholeDistance{}; });
}

void add_integer_block(Difference& to, const Rows& rows, const Span& span, bool same) {
  switch (std::max(nbytes_of(rows.element_a), nbytes_of(rows.element_b))) {
    case 1:
    case 2:
      return add_whole_block<float>(to, rows, span, same);
    case 4:
      return add_whole_block<double>(to, rows, span, same);
    default:
      return add_wide_integer_block(to, rows, span, same);
  }
}

// ------------------------------------------------------------------------------- complex numbers

struct Complex {
  double real;
  double imaginary;
};

bool is_finite(Complex x) { return std::isfinite(x.real) && std::isfinite(x.imaginary); }

Special special(Complex x) {
  const bool is_nan = std::isnan(x.real) || std::isnan(x.imaginary);
  return {is_nan, !is_nan && !is_finite(x)};
}

bool are_same(Complex a, Complex b) { return a.real == b.real && a.imaginary == b.imaginary; }

// The complex numbers of a block; real ones get a zero imaginary part.
class ComplexBlock {
 public:
  ComplexBlock(Element element, const std::byte* data, std::size_t n) {
    switch (element) {
      case Element::kComplex128:
        convert<double>(data, 2 * n, numbers_.data());
        return;
      case Element::kComplex64:
        convert<float>(data, 2 * n, numbers_.data());
        return;
      case Element::kComplex32: {
        std::array<float, 2 * kPairsLength> floats;
        convert<Half>(data, 2 * n, floats.data());
        std::copy_n(floats.begin(), 2 * n, numbers_.begin());
        return;
      }
      default: {
        const Block<double> block(element, data, n);
        for (std::size_t i = 0; i < n; ++i) {
          numbers_[2 * i] = block.numbers()[i];
          numbers_[2 * i + 1] = 0;
        }
      }
    }
  }

  const double* numbers() const { return numbers_.data(); }
  Complex operator[](std::size_t i) const { return {numbers_[2 * i], numbers_[2 * i + 1]}; }

 private:
  std::array<double, 2 * kPairsLength> numbers_;
};

void add_distance(Difference& to, const Rows& rows, Complex a, Complex b) {
  const double distance = std::hypot(a.real - b.real, a.imaginary - b.imaginary);
  if (distance == 0) return;
  const double size = std::hypot(b.real, b.imaginary);
  to.max_abs = std::max(to.max_abs, distance);
  if (std::isfinite(distance) && std::isfinite(size)) {
    to.n_outside += rows.tolerance.allows(distance, size) ? 0U : 1U;
    to.max_rel = std::max(to.max_rel, distance / size);
    return;
  }
  const double quarter =
      std::hypot(quarter_distance(a.real, b.real), quarter_distance(a.imaginary, b.imaginary));
  const double quarter_size = std::hypot(b.real / 4, b.imaginary / 4);
  const Tolerance quartered{rows.tolerance.relative, rows.tolerance.absolute / 4};
  to.n_outside += quartered.allows(quarter, quarter_size) ? 0U : 1U;
  to.max_rel = std::max(to.max_rel, quarter / quarter_size);
}

double part_distance(double x, double y) { return x == y ? 0 : std::abs(x - y); }

void add_complex_block(Difference& to, const Rows& rows, const Span& span, bool same) {
  const ComplexBlock a(rows.element_a, span.a, span.n);
  const ComplexBlock b(same ? rows.element_a : rows.element_b, same ? span.a : span.b, span.n);
  std::array<std::uint8_t, 2 * kPairsLength> ulps;
  distances_loops<double>().ulps(a.numbers(), b.numbers(), 2 * span.n, rows.grid, ulps.data());
  // Both parts of the finite numbers.
  std::array<double, 2 * kPairsLength> x;
  std::array<double, 2 * kPairsLength> y;
  std::size_t n_parts = 0;
  for (std::size_t i = 0; i < span.n; ++i) {
    if (is_finite(a[i]) && is_finite(b[i])) {
      add_distance(to, rows, a[i], b[i]);
      ++to.ulps[std::max(ulps[2 * i], ulps[2 * i + 1])];
      for (const auto part : {&Complex::real, &Complex::imaginary}) {
        x[n_parts] = a[i].*part;
        y[n_parts++] = b[i].*part;
      }
    } else {
      const double distance = std::hypot(part_distance(a[i].real, b[i].real),
                                         part_distance(a[i].imaginary, b[i].imaginary));
      add_special(to, special(a[i]), special(b[i]), are_same(a[i], b[i]), distance);
    }
  }
  add(to.products, products_of(x.data(), y.data(), n_parts));
  if (rows.element_a == rows.element_b) return;
  add_values(to, span.begin, span.n, [&](std::size_t i) {
    return !are_same(a[i], b[i]) && !(special(a[i]).is_nan && special(b[i]).is_nan);
  });
}

// ------------------------------------------------------------------------------------ all of them

void add_block(Difference& to, const Rows& rows, const Span& span) {
  bool same = false;
  if (rows.element_a == rows.element_b) {
    const std::size_t count = count_different(rows.element_a, span.a, span.b, span.n);
    add_different(to, count,
                  [&] { return span.begin + first_different(rows.element_a, span.a, span.b); });
    same = count == 0;
  }
  switch (rows.numbers) {
    case Numbers::kFloats:
      return add_real_block<float>(to, rows, span, same);
    case Numbers::kDoubles:
      return add_real_block<double>(to, rows, span, same);
    case Numbers::kIntegers:
      return add_integer_block(to, rows, span, same);
    case Numbers::kComplex:
      return add_complex_block(to, rows, span, same);
  }
}

Difference difference_of_chunk(const Rows& rows, std::size_t begin, std::size_t end) {
  Difference result;
  for (std::size_t i = begin; i < end; i += kPairsLength) {
    add_block(result, rows, rows.span(i, std::min(kPairsLength, end - i)));
  }
  return result;
}

void merge(Difference& to, const Difference& from) {
  if (to.n_different == 0) to.first_different = from.first_different;
  to.n_different += from.n_different;
  to.n_outside += from.n_outside;
  to.n_nan_a += from.n_nan_a;
  to.n_nan_b += from.n_nan_b;
  to.n_inf_a += from.n_inf_a;
  to.n_inf_b += from.n_inf_b;
  to.n_nan_only_a += from.n_nan_only_a;
  to.n_nan_only_b += from.n_nan_only_b;
  to.n_inf_mismatch += from.n_inf_mismatch;
  to.max_abs = std::max(to.max_abs, from.max_abs);
  to.max_rel = std::max(to.max_rel, from.max_rel);
  to.max_abs_integer = std::max(to.max_abs_integer, from.max_abs_integer);
  add(to.products, from.products);
  for (std::size_t i = 0; i < kNUlpBuckets; ++i) to.ulps[i] += from.ulps[i];
}

Rows rows_of(Element element_a, const void* a, Element element_b, const void* b,
             const Tolerance& tolerance) {
  const bool one_is_pair =
      element_a == Element::kFloat4E2M1Pair || element_b == Element::kFloat4E2M1Pair;
  if (one_is_pair && element_a != element_b) {
    throw std::invalid_argument("cannot compare float4 (two numbers per element) to another dtype");
  }
  return {element_a,
          element_b,
          static_cast<const std::byte*>(a),
          static_cast<const std::byte*>(b),
          tolerance,
          numbers_of(element_a, element_b),
          coarser(format_of(element_a).grid, format_of(element_b).grid)};
}

}  // namespace

Difference difference_of(Element element_a, const void* a, Element element_b, const void* b,
                         std::size_t n, const Tolerance& tolerance, std::size_t n_threads,
                         const Poll& poll) {
  const Rows rows = rows_of(element_a, a, element_b, b, tolerance);
  const std::size_t length = element_a == Element::kFloat4E2M1Pair ? 2 * n : n;
  const std::size_t n_chunks = (length + kChunkLength - 1) / kChunkLength;
  std::vector<Difference> parts(n_chunks);
  const auto do_chunk = [&](std::size_t i) {
    parts[i] =
        difference_of_chunk(rows, i * kChunkLength, std::min(length, (i + 1) * kChunkLength));
  };
  if (n_threads < 2 || length < kLengthOfThreads) {
    for (std::size_t i = 0; i < n_chunks; ++i) do_chunk(i);
  } else {
    run_chunks(n_chunks, std::min(n_threads, n_chunks), do_chunk, poll);
  }
  Difference result;
  for (const Difference& part : parts) merge(result, part);
  result.n = length;
  if (result.n_different == 0) result.first_different = length;
  return result;
}

}  // namespace ptsave
