#include "core/crc/crc32.h"

#include <array>
#include <atomic>
#include <iterator>

#include "core/crc/crc32_kernels.h"

namespace ptsave {
namespace crc32_internal {
namespace {

// Compilers turn this into one load on little-endian machines.
std::uint32_t load_little_endian(const unsigned char* p) {
  return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
         static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}

// Returns how the four bytes of `word` change the state, if `Following` more bytes come after them.
template <std::size_t Following>
std::uint32_t slice_word(std::uint32_t word) {
  return kSlices[Following + 3][word & 0xFF] ^ kSlices[Following + 2][(word >> 8) & 0xFF] ^
         kSlices[Following + 1][(word >> 16) & 0xFF] ^ kSlices[Following][word >> 24];
}

}  // namespace

// Slicing-by-16: sixteen independent look-ups per 16 bytes instead of a chain of sixteen.
std::uint32_t update_portable(std::uint32_t crc, const void* data, std::size_t nbytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t state = ~crc;
  for (; nbytes >= 16; nbytes -= 16, p += 16) {
    state = slice_word<12>(state ^ load_little_endian(p)) ^
            slice_word<8>(load_little_endian(p + 4)) ^ slice_word<4>(load_little_endian(p + 8)) ^
            slice_word<0>(load_little_endian(p + 12));
  }
  return ~update_bytewise(state, p, nbytes);
}

}  // namespace crc32_internal

namespace {

using crc32_internal::ByteTable;

constexpr Crc32Kernel kKernels[] = {
    {"portable", [] { return true; }, crc32_internal::update_portable,
     crc32_internal::copy_by_pieces<crc32_internal::update_portable>},
#if defined(__x86_64__)
    {"pclmulqdq", crc32_internal::pclmulqdq_supported, crc32_internal::update_pclmulqdq,
     crc32_internal::copy_pclmulqdq},
    {"vpclmulqdq_avx2", crc32_internal::vpclmulqdq_avx2_supported,
     crc32_internal::update_vpclmulqdq_avx2, crc32_internal::copy_pclmulqdq},
    {"vpclmulqdq", crc32_internal::vpclmulqdq_supported, crc32_internal::update_vpclmulqdq,
     crc32_internal::copy_pclmulqdq},
#elif defined(__aarch64__)
    {"arm64", crc32_internal::arm64_crc_supported, crc32_internal::update_arm64_crc,
     crc32_internal::copy_by_pieces<crc32_internal::update_arm64_crc>},
#endif
};

// Null until the first call.  Constant-initialised, so that crc32() works in static constructors.
// Relaxed order is enough: it points to constants, and racing threads store the same pointer.
constinit std::atomic<const Crc32Kernel*> g_active{nullptr};

const Crc32Kernel* select_kernel() {
  std::size_t best = std::size(kKernels) - 1;
  while (!kKernels[best].supported()) --best;  // "portable", the first, is always supported
  g_active.store(&kKernels[best], std::memory_order_relaxed);
  return &kKernels[best];
}

// a * b mod P.  The 32 partial products are independent, unlike multiply_mod_p's steps.  Their sum
// has the powers 62..0; its upper half is reduced by table.
std::uint32_t multiply_fast(std::uint32_t a, std::uint32_t b) {
  std::uint64_t product = 0;
  for (int bit = 0; bit < 32; ++bit) {
    product ^= (std::uint64_t{a} << bit) & (0 - std::uint64_t{(b >> bit) & 1});
  }
  product <<= 1;  // bit k is now the coefficient of x^(63-k)
  const auto upper = static_cast<std::uint32_t>(product);
  const auto lower = static_cast<std::uint32_t>(product >> 32);
  const auto& slices = crc32_internal::kSlices;
  return lower ^ slices[3][upper & 0xFF] ^ slices[2][(upper >> 8) & 0xFF] ^
         slices[1][(upper >> 16) & 0xFF] ^ slices[0][upper >> 24];
}

// kByteOfExponent[k][d] = x^(d * 256^k): any 32-bit exponent is a product of four entries.
constexpr std::array<ByteTable, 4> kByteOfExponent = [] {
  std::array<ByteTable, 4> powers{};
  for (std::size_t k = 0; k < powers.size(); ++k) {
    const std::uint32_t base = crc32_internal::x_power(std::uint64_t{1} << (8 * k));
    powers[k][0] = crc32_internal::x_power(0);
    for (std::size_t d = 1; d < 256; ++d) {
      powers[k][d] = crc32_internal::multiply_mod_p(powers[k][d - 1], base);
    }
  }
  return powers;
}();

}  // namespace

std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t nbytes) {
  return crc32_active_kernel().update(crc, data, nbytes);
}

std::uint32_t crc32_copy(std::uint32_t crc, void* dst, const void* src, std::size_t nbytes) {
  return crc32_active_kernel().copy(crc, dst, src, nbytes);
}

// crc(A B) = crc(A) * x^(8 nbytes_b) + crc(B): the inversions at both ends cancel out.
std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b) {
  constexpr std::uint64_t kOrderOfX = 0xFFFF'FFFF;  // P is primitive: x^(2^32 - 1) = 1
  std::uint64_t exponent = (nbytes_b % kOrderOfX) * 8 % kOrderOfX;
  std::uint32_t shifted = crc_a;
  for (std::size_t k = 0; exponent != 0; ++k, exponent >>= 8) {
    const std::size_t digit = exponent & 0xFF;
    if (digit != 0) shifted = multiply_fast(shifted, kByteOfExponent[k][digit]);
  }
  return shifted ^ crc_b;
}

std::span<const Crc32Kernel> crc32_kernels() { return kKernels; }

const Crc32Kernel& crc32_active_kernel() {
  const Crc32Kernel* const active = g_active.load(std::memory_order_relaxed);
  return active != nullptr ? *active : *select_kernel();
}

}  // namespace ptsave
