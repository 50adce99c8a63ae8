#include "core/patches/patches.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ptsave {
namespace {

constexpr std::size_t kLineNbytes = 64;
// The processor alone fetches two streams too late: with this distance, comparing is 1.3 times as
// fast.
constexpr std::size_t kPrefetchNbytes = 2048;
constexpr std::size_t kPrefetchCount = 32;  // changes that are fetched in advance

#if defined(__SSE2__)
// Bit i of the result is set if byte i of the two lines differs.
std::uint64_t differing_bytes(const std::byte* a, const std::byte* b) {
  std::uint64_t equal = 0;
  for (std::size_t i = 0; i < kLineNbytes; i += sizeof(__m128i)) {
    const __m128i left = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i));
    const __m128i right = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i));
    const int bits = _mm_movemask_epi8(_mm_cmpeq_epi8(left, right));
    equal |= std::uint64_t{static_cast<std::uint32_t>(bits)} << i;
  }
  return ~equal;
}
#else
// Bit i of the result is set if byte i of the word is not zero.
std::uint64_t nonzero_bytes(std::uint64_t word) {
  constexpr std::uint64_t kLowBits = 0x7F7F7F7F7F7F7F7F;
  const std::uint64_t high_bits = (((word & kLowBits) + kLowBits) | word) & ~kLowBits;
  return ((high_bits >> 7) * 0x0102040810204080) >> 56;  // the product gathers the eight bits
}

std::uint64_t differing_bytes(const std::byte* a, const std::byte* b) {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < kLineNbytes; i += sizeof(std::uint64_t)) {
    std::uint64_t left;
    std::uint64_t right;
    std::memcpy(&left, a + i, sizeof left);
    std::memcpy(&right, b + i, sizeof right);
    if (left != right) bits |= nonzero_bytes(left ^ right) << i;
  }
  return bits;
}
#endif

}  // namespace

ByteChanges::ByteChanges(std::span<const std::byte> before, std::span<const std::byte> after,
                         Xxh3Stream* digest) {
  const std::size_t nbytes = after.size();
  std::size_t n_hashed = 0;
  Block* block = nullptr;
  std::size_t n = Block::kLength;
  const auto add = [&](std::size_t at) {
    block->positions[n] = static_cast<std::uint32_t>(at);
    block->values[n] = after[at];
    ++n;
  };
  const auto reserve_line = [&] {
    if (n + kLineNbytes <= Block::kLength) return;
    if (block != nullptr) block->n = n;
    block = blocks_.emplace_back(new Block).get();
    n = 0;
  };
  for (std::size_t begin = 0; begin < nbytes; begin += kHashedPieceNbytes) {
    const std::size_t end = std::min(begin + kHashedPieceNbytes, nbytes);
    std::size_t at = begin;
    for (; at + kLineNbytes <= end; at += kLineNbytes) {
      __builtin_prefetch(before.data() + at + kPrefetchNbytes);
      __builtin_prefetch(after.data() + at + kPrefetchNbytes);
      std::uint64_t bits = differing_bytes(before.data() + at, after.data() + at);
      if (bits == 0) continue;
      reserve_line();
      for (; bits != 0; bits &= bits - 1) {
        add(at + static_cast<std::size_t>(std::countr_zero(bits)));
      }
    }
    reserve_line();
    for (; at < end; ++at) {
      if (before[at] != after[at]) add(at);
    }
    const bool has_changed = n != 0 || blocks_.size() > 1;
    if (digest != nullptr && has_changed) {
      digest->update(after.data() + n_hashed, end - n_hashed);
      n_hashed = end;
    }
  }
  if (block != nullptr) block->n = n;
}

std::size_t ByteChanges::count() const {
  std::size_t count = 0;
  for (const auto& block : blocks_) count += block->n;
  return count;
}

std::size_t ByteChanges::patch_nbytes() const {
  return sizeof(std::uint32_t) + count() * (sizeof(std::uint32_t) + 1);
}

void ByteChanges::write_patch(std::byte* patch) const {
  const auto n = static_cast<std::uint32_t>(count());
  std::memcpy(patch, &n, sizeof n);
  std::byte* positions = patch + sizeof n;
  std::byte* values = positions + n * sizeof n;
  for (const auto& block : blocks_) {
    std::memcpy(positions, block->positions.data(), block->n * sizeof n);
    std::memcpy(values, block->values.data(), block->n);
    positions += block->n * sizeof n;
    values += block->n;
  }
}

Patch::Patch(std::span<const std::byte> bytes) {
  std::uint32_t count = 0;
  if (bytes.size() >= sizeof count) std::memcpy(&count, bytes.data(), sizeof count);
  count_ = count;
  if (bytes.size() != sizeof count + count_ * (sizeof count + 1)) {
    throw std::invalid_argument("the number of changes does not fit the patch's size");
  }
  positions_ = bytes.data() + sizeof count;
  values_ = positions_ + count_ * sizeof count;
}

std::uint32_t Patch::position(std::size_t i) const {
  std::uint32_t value;
  std::memcpy(&value, positions_ + i * sizeof value, sizeof value);
  return value;
}

void Patch::check(std::uint64_t nbytes) const {
  std::uint64_t next = 0;  // the least position that may come
  for (std::size_t i = 0; i < count_; ++i) {
    if (position(i) < next) throw std::invalid_argument("the positions do not ascend");
    next = std::uint64_t{position(i)} + 1;
  }
  if (next > nbytes) throw std::invalid_argument("a position is outside of the tensor");
}

void Patch::prefetch(std::size_t i, const std::byte* target, std::uint64_t begin) const {
  if (i + kPrefetchCount >= count_) return;
  // An address outside of the target does no harm here.
  const std::uint64_t offset = position(i + kPrefetchCount) - begin;
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(target) + offset));
}

void Patch::write_inverse(std::span<const std::byte> target, std::byte* patch) const {
  std::byte* values = std::copy(positions_ - sizeof(std::uint32_t), values_, patch);
  for (std::size_t i = 0; i < count_; ++i) {
    prefetch(i, target.data(), 0);
    const std::size_t at = position(i);
    *values++ = at < target.size() ? target[at] : std::byte{0};
  }
}

std::size_t Patch::find(std::uint64_t position) const {
  std::size_t first = 0;
  for (std::size_t n = count_; n != 0;) {  // binary search
    const std::size_t half = n / 2;
    if (this->position(first + half) < position) {
      first += half + 1;
      n -= half + 1;
    } else {
      n = half;
    }
  }
  return first;
}

std::size_t Patch::apply(std::size_t i, std::uint64_t begin, std::span<std::byte> target) const {
  for (; i < count_; ++i) {
    prefetch(i, target.data(), begin);
    const std::uint64_t at = position(i) - begin;  // huge if the position is less than `begin`
    if (at >= target.size()) break;
    target[at] = values_[i];
  }
  return i;
}

template <typename Use>
void Patch::merge(const Patch& newer, const Use& use) const {
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < count_ || j < newer.count_) {
    if (j == newer.count_ || (i < count_ && position(i) < newer.position(j))) {
      use(position(i), values_[i]);
      ++i;
    } else {
      if (i < count_ && position(i) == newer.position(j)) ++i;
      use(newer.position(j), newer.values_[j]);
      ++j;
    }
  }
}

std::size_t Patch::merged_nbytes(const Patch& newer) const {
  std::size_t n = 0;
  merge(newer, [&](std::uint32_t, std::byte) { ++n; });
  return sizeof(std::uint32_t) + n * (sizeof(std::uint32_t) + 1);
}

void Patch::write_merged(const Patch& newer, std::span<std::byte> patch) const {
  const auto n = static_cast<std::uint32_t>(patch.size() / (sizeof(std::uint32_t) + 1));
  std::memcpy(patch.data(), &n, sizeof n);
  std::byte* positions = patch.data() + sizeof n;
  std::byte* values = positions + n * sizeof n;
  merge(newer, [&](std::uint32_t position, std::byte value) {
    std::memcpy(positions, &position, sizeof position);
    positions += sizeof position;
    *values++ = value;
  });
}

}  // namespace ptsave
