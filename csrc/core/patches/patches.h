// Patches of bytes: the positions at which new contents differ from old ones, and the new bytes.
//
//     u32 count, u32 positions[count], u8 values[count]
//
// All numbers are little-endian, and the positions ascend.  This is the encoding "overwrite" of
// ptsave.deltas.  Applying a patch twice has the same result as applying it once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/hash/xxh3.h"

namespace ptsave {

// The count has 32 bits, and all bytes may have changed.
inline constexpr std::uint64_t kMaxPatchedNbytes = 0xFFFFFFFF;
// A hash reads pieces of this size as soon as they are compared or changed, from the processor's
// cache.
inline constexpr std::size_t kHashedPieceNbytes = std::size_t{64} << 10;

// The bytes of `after` that differ from `before`, in the order of their positions.
class ByteChanges {
 public:
  // Compares two pieces of memory of one size, at most kMaxPatchedNbytes, in one pass.  `digest`
  // takes all of `after`, unless it is null or nothing has changed.
  ByteChanges(std::span<const std::byte> before, std::span<const std::byte> after,
              Xxh3Stream* digest);

  std::size_t patch_nbytes() const;
  // Writes patch_nbytes() bytes.
  void write_patch(std::byte* patch) const;

 private:
  // Blocks of this size are reused by malloc.  Growing vectors would take twice as long.
  struct Block {
    static constexpr std::size_t kLength = 16 << 10;
    std::size_t n = 0;
    std::array<std::uint32_t, kLength> positions;
    std::array<std::byte, kLength> values;
  };

  std::size_t count() const;

  std::vector<std::unique_ptr<Block>> blocks_;
};

// A patch that may come from an attacker.
class Patch {
 public:
  // Throws std::invalid_argument if the size does not fit the count.
  explicit Patch(std::span<const std::byte> bytes);

  // Throws std::invalid_argument unless the positions ascend and are less than `nbytes`.
  void check(std::uint64_t nbytes) const;
  std::size_t count() const { return count_; }
  // Writes the patch of the same size that undoes this one; `target` has the old bytes.
  void write_inverse(std::span<const std::byte> target, std::byte* patch) const;
  // The number of the first change that is not before a position.
  std::size_t find(std::uint64_t position) const;
  // Changes the bytes of `target`, which begins at position `begin`; `i` is find(begin).  Returns
  // the number of the first change behind the target.  Writes nothing outside of `target`, even if
  // the positions do not ascend.
  std::size_t apply(std::size_t i, std::uint64_t begin, std::span<std::byte> target) const;
  // The patch that has the effect of this one and then of `newer`: its size, and its bytes.  The
  // positions of both must ascend.
  std::size_t merged_nbytes(const Patch& newer) const;
  void write_merged(const Patch& newer, std::span<std::byte> patch) const;

 private:
  // Calls use(position, value) for each change of this patch and of `newer`, in order.
  template <typename Use>
  void merge(const Patch& newer, const Use& use) const;
  std::uint32_t position(std::size_t i) const;
  // Fetches the byte of a later change into the cache.
  void prefetch(std::size_t i, const std::byte* target, std::uint64_t begin) const;

  std::size_t count_;
  const std::byte* positions_;
  const std::byte* values_;
};

}  // namespace ptsave
