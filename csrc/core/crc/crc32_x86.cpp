// CRC-32 by carry-less multiplication: PCLMULQDQ (128-bit registers) and VPCLMULQDQ (256 and 512).
//
// The method is from Intel, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", 2009.
// Any polynomial that is congruent to the message modulo P represents it.  Read as a reflected
// polynomial, a 128-bit register A has x^127 in bit 0; its low half L holds the higher powers: A =
// L x^64 + H.  Appending D bits to the message multiplies A by x^D:
//     A x^D = L x^(64+D) + H x^D  =  L (x^(64+D) mod P) + H (x^D mod P)   (mod P).
// These are two multiplications of 64 by 32 bits, whose sum fits a register: a *fold* by D.
// PCLMULQDQ of two reflected 64-bit values yields the product times x, so constants have one power
// less.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/crc/crc32_kernels.h"

// The file needs no special compiler flags: each function names its features.  A function shared
// with a wider kernel names a subset of that kernel's features, so that it can be inlined there.
#define PTSAVE_TARGET_128 __attribute__((target("avx,pclmul")))
#define PTSAVE_TARGET_256 __attribute__((target("avx2,pclmul,vpclmulqdq")))
#define PTSAVE_TARGET_512 __attribute__((target("avx512f,avx512vl,avx2,pclmul,vpclmulqdq")))
#define PTSAVE_INLINE __attribute__((always_inline)) inline

namespace ptsave::crc32_internal {
namespace {

// The multipliers that fold one 128-bit lane, for its low and its high half.
struct FoldConstants {
  std::uint64_t low;
  std::uint64_t high;
};

// Bit j of a 64-bit reflected value is x^(63-j), so a remainder sits in its upper 32 bits.
constexpr FoldConstants fold_by(std::uint64_t nbits) {
  return {std::uint64_t{x_power(nbits + 64 - 1)} << 32, std::uint64_t{x_power(nbits - 1)} << 32};
}

// The same fold in each of N lanes.
template <std::size_t N>
struct alignas(16 * N) LaneConstants {
  FoldConstants lanes[N];
};

template <std::size_t N>
constexpr LaneConstants<N> fold_lanes_by(std::uint64_t nbits) {
  LaneConstants<N> constants{};
  for (FoldConstants& lane : constants.lanes) lane = fold_by(nbits);
  return constants;
}

// The multipliers that fold lane i of N onto the last lane.  The last lane stays where it is: its
// entry is zero and the caller adds it unfolded.
template <std::size_t N>
constexpr LaneConstants<N> gather_lanes() {
  LaneConstants<N> constants{};
  for (std::size_t i = 0; i + 1 < N; ++i) constants.lanes[i] = fold_by(128 * (N - 1 - i));
  return constants;
}

// floor(x^95 / P), reflected in 64 bits: long division, one quotient bit per step, highest first.
constexpr std::uint64_t barrett_quotient() {
  std::uint64_t quotient = 1;             // x^63 (bit 0): x^95 = x^63 * x^32
  std::uint32_t remainder = kPolynomial;  // x^32 mod P
  for (int bit = 1; bit < 64; ++bit) {
    quotient |= std::uint64_t{remainder & 1} << bit;
    remainder = times_x(remainder);
  }
  return quotient;
}

// Shuffles: the 16 bytes at offset n move a register's bytes up by 16 - n, and the 16 bytes at
// offset 16 + n move them down by n. 0x80 yields a zero byte.
alignas(16) constexpr unsigned char kByteShifts[48] = {
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
    0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};

template <typename T>
PTSAVE_INLINE T load_word(const unsigned char* p) {
  T word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

PTSAVE_TARGET_128 PTSAVE_INLINE __m128i load_128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

template <std::uint64_t NBits>
PTSAVE_TARGET_128 PTSAVE_INLINE __m128i constants_128() {
  static constexpr auto kConstants = fold_lanes_by<1>(NBits);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(&kConstants));
}

PTSAVE_TARGET_128 PTSAVE_INLINE __m128i fold_128(__m128i a, __m128i constants, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(a, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(a, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// The state that A stands for: A x^32 mod P.
//
// First A x^32 = L x^96 + H x^32 becomes T = L (x^96 mod P) + H x^32 of degree 95.  The register
// holds T x^32, so that T's upper 64 coefficients T' fill its low half.  Then Barrett: the quotient
// of T' x^32 by P is exactly floor(T' * floor(x^95 / P) / x^63), which is the low half of one
// PCLMULQDQ.  Its product with P, x^32 up, leaves the remainder in the third dword.
PTSAVE_TARGET_128 PTSAVE_INLINE std::uint32_t reduce(__m128i a) {
  constexpr std::uint64_t kX96 = std::uint64_t{x_power(96)} << 1;      // times x^31
  constexpr std::uint64_t kP = (std::uint64_t{kPolynomial} << 1) | 1;  // times x^31
  constexpr std::uint64_t kQuotient = barrett_quotient();
  const __m128i x96_and_p =
      _mm_set_epi64x(static_cast<long long>(kP), static_cast<long long>(kX96));
  const __m128i t = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, x96_and_p, 0x00));
  const __m128i quotient =
      _mm_clmulepi64_si128(t, _mm_cvtsi64_si128(static_cast<long long>(kQuotient)), 0x00);
  const __m128i remainder = _mm_xor_si128(_mm_clmulepi64_si128(quotient, x96_and_p, 0x10), t);
  return static_cast<std::uint32_t>(_mm_extract_epi32(remainder, 2));
}

// Updates the state by up to 15 bytes, right-aligned in a register (leading zeros do not count).
PTSAVE_TARGET_128 PTSAVE_INLINE std::uint32_t update_short(std::uint32_t state,
                                                           const unsigned char* p,
                                                           std::size_t nbytes) {
  if (nbytes < 4) return update_bytewise(state, p, nbytes);
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  if (nbytes >= 8) {  // two overlapping loads; the shift has two steps because it may be 64 in all
    low = load_word<std::uint64_t>(p) << (8 * (15 - nbytes)) << 8;
    high = load_word<std::uint64_t>(p + nbytes - 8);
  } else {
    const std::uint64_t first = load_word<std::uint32_t>(p);
    high = std::uint64_t{load_word<std::uint32_t>(p + nbytes - 4)} << 32 |
           ((first << (8 * (8 - nbytes))) & 0xFFFF'FFFF);
  }
  const __m128i message = _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low));
  const __m128i aligned_state =
      _mm_shuffle_epi8(_mm_cvtsi32_si128(static_cast<int>(state)), load_128(kByteShifts + nbytes));
  return reduce(_mm_xor_si128(message, aligned_state));
}

// The state after A and `nbytes` more bytes at p; the 16 bytes before p must be readable.
PTSAVE_TARGET_128 PTSAVE_INLINE std::uint32_t finish(__m128i a, const unsigned char* p,
                                                     std::size_t nbytes) {
  const __m128i by_128 = constants_128<128>();
  for (; nbytes >= 16; nbytes -= 16, p += 16) a = fold_128(a, by_128, load_128(p));
  if (nbytes != 0) {
    // A and the last bytes are 16 + nbytes bytes: the last 16 of them stay, the others are folded.
    const __m128i down = load_128(kByteShifts + 16 + nbytes);
    const __m128i first = _mm_shuffle_epi8(a, load_128(kByteShifts + nbytes));
    const __m128i last =
        _mm_blendv_epi8(_mm_shuffle_epi8(a, down), load_128(p + nbytes - 16), down);
    a = fold_128(first, by_128, last);
  }
  return reduce(a);
}

// Without this, the hardware's prefetcher leaves a third of one core's memory bandwidth unused.
// Wider registers do not need it: they keep more loads in flight.  A prefetch cannot fault, so it
// may run past the end; therefore the address is computed as an integer.
PTSAVE_INLINE void prefetch_ahead(const unsigned char* p) {
  constexpr std::uintptr_t kDistance = 2560;  // bytes; best of 512 .. 16384 for update and copy
  _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(p) + kDistance),
               _MM_HINT_T0);
}

// Four registers side by side, 64 bytes, hide the latency of the multiplication.
struct Block {
  __m128i a0, a1, a2, a3;
};

PTSAVE_TARGET_128 PTSAVE_INLINE Block load_block(const unsigned char* p) {
  return {load_128(p), load_128(p + 16), load_128(p + 32), load_128(p + 48)};
}

// Adds the state by xoring it into the first four bytes of the message.
PTSAVE_TARGET_128 PTSAVE_INLINE __m128i with_state(__m128i first, std::uint32_t state) {
  return _mm_xor_si128(first, _mm_cvtsi32_si128(static_cast<int>(state)));
}

PTSAVE_TARGET_128 PTSAVE_INLINE Block fold_block(Block a, __m128i by_512, Block next) {
  return {fold_128(a.a0, by_512, next.a0), fold_128(a.a1, by_512, next.a1),
          fold_128(a.a2, by_512, next.a2), fold_128(a.a3, by_512, next.a3)};
}

PTSAVE_TARGET_128 PTSAVE_INLINE __m128i gather_block(Block a) {
  const __m128i by_128 = constants_128<128>();
  const __m128i upper = fold_128(a.a0, by_128, a.a1);
  const __m128i lower = fold_128(a.a2, by_128, a.a3);
  return fold_128(upper, constants_128<256>(), lower);
}

}  // namespace

PTSAVE_TARGET_128 std::uint32_t update_pclmulqdq(std::uint32_t crc, const void* data,
                                                 std::size_t nbytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  const std::uint32_t state = ~crc;
  if (nbytes < 16) return ~update_short(state, p, nbytes);
  if (nbytes < 64) return ~finish(with_state(load_128(p), state), p + 16, nbytes - 16);

  Block block = load_block(p);
  block.a0 = with_state(block.a0, state);
  p += 64;
  nbytes -= 64;
  const __m128i by_512 = constants_128<512>();
  for (; nbytes >= 64; nbytes -= 64, p += 64) {
    prefetch_ahead(p);
    block = fold_block(block, by_512, load_block(p));
  }
  return ~finish(gather_block(block), p, nbytes);
}

namespace {

// Writes 64 bytes to an aligned `dst` past the caches: no cache line is read first, and none
// displaces a useful one.
PTSAVE_TARGET_128 PTSAVE_INLINE void stream_block(unsigned char* dst, Block block) {
  auto* const to = reinterpret_cast<__m128i*>(dst);
  _mm_stream_si128(to, block.a0);
  _mm_stream_si128(to + 1, block.a1);
  _mm_stream_si128(to + 2, block.a2);
  _mm_stream_si128(to + 3, block.a3);
}

}  // namespace

PTSAVE_TARGET_128 std::uint32_t copy_pclmulqdq(std::uint32_t crc, void* dst, const void* src,
                                               std::size_t nbytes) {
  constexpr std::size_t kSmallestStreamed = 16384;  // smaller ones are cheap, and may be read soon
  if (nbytes < kSmallestStreamed) return copy_by_pieces<update_pclmulqdq>(crc, dst, src, nbytes);
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(to)) % 64;
  crc = copy_by_pieces<update_pclmulqdq>(crc, to, from, head);
  to += head;
  from += head;
  nbytes -= head;

  Block block = load_block(from);
  stream_block(to, block);
  block.a0 = with_state(block.a0, ~crc);
  const __m128i by_512 = constants_128<512>();
  for (to += 64, from += 64, nbytes -= 64; nbytes >= 64; to += 64, from += 64, nbytes -= 64) {
    prefetch_ahead(from);
    const Block next = load_block(from);
    stream_block(to, next);
    block = fold_block(block, by_512, next);
  }
  std::memcpy(to, from, nbytes);
  _mm_sfence();  // nothing else orders streamed stores, not even releasing a mutex
  return ~finish(gather_block(block), to, nbytes);  // of the copy: the source may be changing
}

bool pclmulqdq_supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx") && __builtin_cpu_supports("pclmul");
}

namespace {

PTSAVE_TARGET_256 PTSAVE_INLINE __m256i load_256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

PTSAVE_TARGET_256 PTSAVE_INLINE __m256i fold_256(__m256i a, __m256i constants, __m256i next) {
  const __m256i low = _mm256_clmulepi64_epi128(a, constants, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(a, constants, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

template <std::uint64_t NBits>
PTSAVE_TARGET_256 PTSAVE_INLINE __m256i constants_256() {
  static constexpr auto kConstants = fold_lanes_by<2>(NBits);
  return load_256(&kConstants);
}

}  // namespace

// For CPUs with VPCLMULQDQ and no AVX-512.
PTSAVE_TARGET_256 std::uint32_t update_vpclmulqdq_avx2(std::uint32_t crc, const void* data,
                                                       std::size_t nbytes) {
  if (nbytes < 256) return update_pclmulqdq(crc, data, nbytes);
  const auto* p = static_cast<const unsigned char*>(data);
  __m256i a0 = _mm256_xor_si256(load_256(p),
                                _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(~crc))));
  __m256i a1 = load_256(p + 32);
  __m256i a2 = load_256(p + 64);
  __m256i a3 = load_256(p + 96);
  p += 128;
  nbytes -= 128;
  const __m256i by_1024 = constants_256<1024>();
  for (; nbytes >= 128; nbytes -= 128, p += 128) {
    prefetch_ahead(p);
    prefetch_ahead(p + 64);
    a0 = fold_256(a0, by_1024, load_256(p));
    a1 = fold_256(a1, by_1024, load_256(p + 32));
    a2 = fold_256(a2, by_1024, load_256(p + 64));
    a3 = fold_256(a3, by_1024, load_256(p + 96));
  }
  const __m256i by_256 = constants_256<256>();
  a1 = fold_256(a0, by_256, a1);
  a3 = fold_256(a2, by_256, a3);
  a3 = fold_256(a1, constants_256<512>(), a3);
  const __m128i a =
      fold_128(_mm256_castsi256_si128(a3), constants_128<128>(), _mm256_extracti128_si256(a3, 1));
  return ~finish(a, p, nbytes);
}

bool vpclmulqdq_avx2_supported() {
  __builtin_cpu_init();
  return pclmulqdq_supported() && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("vpclmulqdq");
}

namespace {

PTSAVE_TARGET_512 PTSAVE_INLINE __m512i load_512(const void* p) { return _mm512_loadu_si512(p); }

PTSAVE_TARGET_512 PTSAVE_INLINE __m512i fold_512(__m512i a, __m512i constants, __m512i next) {
  constexpr int kXorOfThree = 0x96;
  const __m512i low = _mm512_clmulepi64_epi128(a, constants, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(a, constants, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, kXorOfThree);
}

template <std::uint64_t NBits>
PTSAVE_TARGET_512 PTSAVE_INLINE __m512i constants_512() {
  static constexpr auto kConstants = fold_lanes_by<4>(NBits);
  return load_512(&kConstants);
}

// The four lanes of `a`, each folded onto the last.
PTSAVE_TARGET_512 PTSAVE_INLINE __m128i gather_512(__m512i a) {
  static constexpr auto kConstants = gather_lanes<4>();
  const __m512i moved = fold_512(a, load_512(&kConstants), _mm512_setzero_si512());
  // Through memory: GCC 12 warns of its own _mm512_extract* intrinsics (PR 105593).
  alignas(64) __m128i lanes[4];
  _mm512_store_si512(lanes, _mm512_mask_mov_epi64(moved, 0b1100'0000, a));
  return _mm_xor_si128(_mm_xor_si128(lanes[0], lanes[1]), _mm_xor_si128(lanes[2], lanes[3]));
}

}  // namespace

PTSAVE_TARGET_512 std::uint32_t update_vpclmulqdq(std::uint32_t crc, const void* data,
                                                  std::size_t nbytes) {
  if (nbytes < 256) return update_pclmulqdq(crc, data, nbytes);
  const auto* p = static_cast<const unsigned char*>(data);
  __m512i a0 = _mm512_xor_si512(load_512(p),
                                _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
  __m512i a1 = load_512(p + 64);
  __m512i a2 = load_512(p + 128);
  __m512i a3 = load_512(p + 192);
  p += 256;
  nbytes -= 256;
  const __m512i by_2048 = constants_512<2048>();
  for (; nbytes >= 256; nbytes -= 256, p += 256) {
    a0 = fold_512(a0, by_2048, load_512(p));
    a1 = fold_512(a1, by_2048, load_512(p + 64));
    a2 = fold_512(a2, by_2048, load_512(p + 128));
    a3 = fold_512(a3, by_2048, load_512(p + 192));
  }
  const __m512i by_512 = constants_512<512>();
  a1 = fold_512(a0, by_512, a1);
  a3 = fold_512(a2, by_512, a3);
  a3 = fold_512(a1, constants_512<1024>(), a3);
  for (; nbytes >= 64; nbytes -= 64, p += 64) a3 = fold_512(a3, by_512, load_512(p));
  return ~finish(gather_512(a3), p, nbytes);
}

bool vpclmulqdq_supported() {
  __builtin_cpu_init();
  return vpclmulqdq_avx2_supported() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace ptsave::crc32_internal

#endif  // defined(__x86_64__)
