#include "core/memory/stream_copy.h"

#include <cstring>

#include "core/memory/pages.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ptsave {

#if defined(__x86_64__)
namespace {

constexpr std::size_t kLineNbytes = 64;
// Strips are copied side by side, which keeps more of the memory's banks busy.
constexpr std::size_t kStripNbytes = 4096;
constexpr std::size_t kStrips = 4;
constexpr std::size_t kGroupNbytes = kStrips * kStripNbytes;
// A smaller copy may well be read from the cache afterwards.
constexpr std::size_t kMinNbytes = std::size_t{256} << 10;

// `target` is aligned to a line.
inline void stream_line(std::byte* target, const std::byte* source) {
  const auto* const from = reinterpret_cast<const __m128i*>(source);
  auto* const to = reinterpret_cast<__m128i*>(target);
  const __m128i a = _mm_loadu_si128(from);
  const __m128i b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2);
  const __m128i d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

inline void stream_group(std::byte* target, const std::byte* source) {
  for (std::size_t line = 0; line < kStripNbytes; line += kLineNbytes) {
    for (std::size_t strip = 0; strip < kGroupNbytes; strip += kStripNbytes) {
      stream_line(target + strip + line, source + strip + line);
    }
  }
}

}  // namespace

void stream_copy(std::byte* target, const std::byte* source, std::size_t nbytes) noexcept {
  if (nbytes < kMinNbytes) {
    if (nbytes > 0) std::memcpy(target, source, nbytes);
    return;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(target);
  std::size_t at = align_up(address, kLineNbytes) - address;
  std::memcpy(target, source, at);
  for (; at + kGroupNbytes <= nbytes; at += kGroupNbytes) stream_group(target + at, source + at);
  for (; at + kLineNbytes <= nbytes; at += kLineNbytes) stream_line(target + at, source + at);
  _mm_sfence();  // before the copy is announced to other threads
  std::memcpy(target + at, source + at, nbytes - at);
}
#else
void stream_copy(std::byte* target, const std::byte* source, std::size_t nbytes) noexcept {
  if (nbytes > 0) std::memcpy(target, source, nbytes);
}
#endif

}  // namespace ptsave
