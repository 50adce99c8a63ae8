// The arithmetic under crc32.h and the kernels of each CPU family.  Internal to crc32*.cpp.
//
// A CRC is a remainder of polynomials over GF(2) modulo P, a primitive polynomial of degree 32.
// All values are "reflected": bit j of a 32-bit value is the coefficient of x^(31-j).  So the
// message's first bit, the lowest bit of its first byte, has the highest power.  A *state* is the
// CRC before the final inversion: the state after message M, started at s, is s * x^(8 * nbytes(M))
// + M * x^32 mod P.
//
// Everything here is pure and safe for concurrent use; the tables are constants.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ptsave::crc32_internal {

// P without its leading x^32.
inline constexpr std::uint32_t kPolynomial = 0xEDB88320;

constexpr std::uint32_t times_x(std::uint32_t a) {
  return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0);
}

// a * b mod P, for compile time: Horner's scheme from b's highest power down.
constexpr std::uint32_t multiply_mod_p(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int bit = 0; bit < 32; ++bit) {
    product = times_x(product);
    if (((b >> bit) & 1) != 0) product ^= a;
  }
  return product;
}

// x^exponent mod P, for compile time.
constexpr std::uint32_t x_power(std::uint64_t exponent) {
  std::uint32_t power = 0x8000'0000;   // x^0
  std::uint32_t square = 0x4000'0000;  // x^(2^0)
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) power = multiply_mod_p(power, square);
    square = multiply_mod_p(square, square);
  }
  return power;
}

using ByteTable = std::array<std::uint32_t, 256>;

// table[b] = (b as byte `byte_index` of a 32-bit value) * factor mod P.  The map is linear, so
// eight products give all 256 entries.
constexpr ByteTable make_product_table(std::uint32_t factor, int byte_index) {
  ByteTable table{};
  for (std::size_t b = 1; b < table.size(); ++b) {
    const std::size_t lowest_bit = b & (~b + 1);
    table[b] = b == lowest_bit
                   ? multiply_mod_p(static_cast<std::uint32_t>(b) << (8 * byte_index), factor)
                   : table[b ^ lowest_bit] ^ table[lowest_bit];
  }
  return table;
}

// kSlices[k][b]: how byte b changes the state, if k more bytes come after it.
inline constexpr std::size_t kSliceCount = 16;
inline constexpr std::array<ByteTable, kSliceCount> kSlices = [] {
  std::array<ByteTable, kSliceCount> slices{};
  slices[0] = make_product_table(x_power(8), 0);
  for (std::size_t k = 1; k < kSliceCount; ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      const std::uint32_t previous = slices[k - 1][b];
      slices[k][b] = (previous >> 8) ^ slices[0][previous & 0xFF];
    }
  }
  return slices;
}();

// Updates the state byte by byte.  Kernels use it for the few bytes that remain.
inline std::uint32_t update_bytewise(std::uint32_t state, const unsigned char* data,
                                     std::size_t nbytes) {
  for (; nbytes != 0; --nbytes) state = (state >> 8) ^ kSlices[0][(state ^ *data++) & 0xFF];
  return state;
}

// Implements crc32_copy() with any kernel's update: the copy brings a piece into the first-level
// cache, and the checksum finds it there.
template <std::uint32_t (*Update)(std::uint32_t, const void*, std::size_t)>
std::uint32_t copy_by_pieces(std::uint32_t crc, void* dst, const void* src, std::size_t nbytes) {
  constexpr std::size_t kPieceNbytes = 8192;
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  while (nbytes != 0) {
    const std::size_t piece = std::min(nbytes, kPieceNbytes);
    std::memcpy(to, from, piece);
    crc = Update(crc, to, piece);  // of the copy: the source may be changing
    to += piece;
    from += piece;
    nbytes -= piece;
  }
  return crc;
}

// The kernels' crc32() and crc32_copy(), and their checks for support by this CPU.
std::uint32_t update_portable(std::uint32_t crc, const void* data, std::size_t nbytes);

#if defined(__x86_64__)
bool pclmulqdq_supported();
std::uint32_t update_pclmulqdq(std::uint32_t crc, const void* data, std::size_t nbytes);
bool vpclmulqdq_avx2_supported();
std::uint32_t update_vpclmulqdq_avx2(std::uint32_t crc, const void* data, std::size_t nbytes);
bool vpclmulqdq_supported();
std::uint32_t update_vpclmulqdq(std::uint32_t crc, const void* data, std::size_t nbytes);
// Used by all three kernels: memory limits the speed, and 128-bit registers reach that limit.
std::uint32_t copy_pclmulqdq(std::uint32_t crc, void* dst, const void* src, std::size_t nbytes);
#elif defined(__aarch64__)
bool arm64_crc_supported();
std::uint32_t update_arm64_crc(std::uint32_t crc, const void* data, std::size_t nbytes);
#endif

}  // namespace ptsave::crc32_internal
