// CRC-32 by the CRC32 instructions of ARMv8 for zip's polynomial (crc32x, not crc32cx).
//
// The instruction takes three cycles, but one can start in each cycle: three streams side by side
// hide the latency.  Their states are joined as in crc32_combine(), by constant powers of x.
#if defined(__aarch64__)

#include <arm_acle.h>
#include <sys/auxv.h>

#include <cstring>

#include "core/crc/crc32_kernels.h"

#define PTSAVE_TARGET_CRC __attribute__((target("+crc")))
#define PTSAVE_INLINE __attribute__((always_inline)) inline

namespace ptsave::crc32_internal {
namespace {

constexpr unsigned long kHwcapCrc32 = 1UL << 7;  // HWCAP_CRC32 of <asm/hwcap.h>

// tables[k][b]: the state whose byte k is b, after NBytes zero bytes.
template <std::size_t NBytes>
constexpr std::array<ByteTable, 4> make_shift_tables() {
  std::array<ByteTable, 4> tables{};
  for (std::size_t k = 0; k < tables.size(); ++k) {
    tables[k] = make_product_table(x_power(8 * NBytes), static_cast<int>(k));
  }
  return tables;
}

// state * x^(8 NBytes) mod P.
template <std::size_t NBytes>
std::uint32_t shift_state(std::uint32_t state) {
  static constexpr auto kTables = make_shift_tables<NBytes>();
  return kTables[0][state & 0xFF] ^ kTables[1][(state >> 8) & 0xFF] ^
         kTables[2][(state >> 16) & 0xFF] ^ kTables[3][state >> 24];
}

PTSAVE_TARGET_CRC PTSAVE_INLINE std::uint32_t update_8(std::uint32_t state,
                                                       const unsigned char* p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return __crc32d(state, word);
}

// Consumes all whole groups of three streams of NBytes each.
template <std::size_t NBytes>
PTSAVE_TARGET_CRC std::uint32_t update_streams(std::uint32_t state, const unsigned char*& p,
                                               std::size_t& nbytes) {
  for (; nbytes >= 3 * NBytes; nbytes -= 3 * NBytes, p += 3 * NBytes) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < NBytes; i += 8) {
      state = update_8(state, p + i);
      second = update_8(second, p + NBytes + i);
      third = update_8(third, p + 2 * NBytes + i);
    }
    state = shift_state<NBytes>(shift_state<NBytes>(state) ^ second) ^ third;
  }
  return state;
}

}  // namespace

PTSAVE_TARGET_CRC std::uint32_t update_arm64_crc(std::uint32_t crc, const void* data,
                                                 std::size_t nbytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t state = ~crc;
  state = update_streams<4096>(state, p, nbytes);
  state = update_streams<256>(state, p, nbytes);
  for (; nbytes >= 8; nbytes -= 8, p += 8) state = update_8(state, p);
  for (; nbytes != 0; --nbytes, ++p) state = __crc32b(state, *p);
  return ~state;
}

bool arm64_crc_supported() { return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0; }

}  // namespace ptsave::crc32_internal

#endif  // defined(__aarch64__)
