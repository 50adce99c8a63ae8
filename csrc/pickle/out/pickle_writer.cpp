#include "pickle/out/pickle_writer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

namespace ptsave {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr Py_ssize_t kInitialNbytes = 1024;

}  // namespace

PickleWriter::PickleWriter()
    : bytes_(Object::checked(PyBytes_FromStringAndSize(nullptr, kInitialNbytes))),
      next_(PyBytes_AS_STRING(bytes_.get())),
      end_(next_ + kInitialNbytes) {}

void PickleWriter::large_integer(std::int64_t value) {
  if (value >= 0 && value < 0x10000) {
    with_operand(opcode::kBinInt2, static_cast<std::uint16_t>(value));
  } else if (value >= std::numeric_limits<std::int32_t>::min() &&
             value <= std::numeric_limits<std::int32_t>::max()) {
    with_operand(opcode::kBinInt, static_cast<std::int32_t>(value));
  } else {
    // Leave out bytes that only repeat the sign.
    std::size_t n = sizeof value;
    const auto upper_bits = [&](std::size_t n_bits) { return value >> n_bits; };
    while (upper_bits(8 * (n - 1) - 1) == 0 || upper_bits(8 * (n - 1) - 1) == -1) --n;
    std::array<char, sizeof value> bytes{};
    std::memcpy(bytes.data(), &value, sizeof value);
    long_integer({bytes.data(), n});
  }
}

void PickleWriter::long_integer(std::string_view bytes) {
  if (bytes.size() < 256) {
    with_operand(opcode::kLong1, static_cast<std::uint8_t>(bytes.size()));
  } else {
    with_operand(opcode::kLong4, static_cast<std::uint32_t>(bytes.size()));
  }
  append(bytes);
}

void PickleWriter::real(double value) {
  auto bytes = std::bit_cast<std::array<char, sizeof value>>(value);
  std::ranges::reverse(bytes);
  opcode(opcode::kBinFloat);
  append({bytes.data(), bytes.size()});
}

Object PickleWriter::finish() {
  resize(static_cast<std::size_t>(next_ - PyBytes_AS_STRING(bytes_.get())));
  return std::move(bytes_);
}

void PickleWriter::grow(std::size_t n) {
  const auto capacity = static_cast<std::size_t>(end_ - PyBytes_AS_STRING(bytes_.get()));
  resize(2 * capacity + n);
}

void PickleWriter::resize(std::size_t nbytes) {
  const std::ptrdiff_t used = next_ - PyBytes_AS_STRING(bytes_.get());
  PyObject* bytes = bytes_.release();
  checked(_PyBytes_Resize(&bytes, static_cast<Py_ssize_t>(nbytes)));
  bytes_ = Object::steal(bytes);
  next_ = PyBytes_AS_STRING(bytes) + used;
  end_ = PyBytes_AS_STRING(bytes) + nbytes;
}

}  // namespace ptsave
