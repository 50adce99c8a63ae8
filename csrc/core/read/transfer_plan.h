// Plans one transfer, as a pure function of the archive's index: the bytes to read, cut into
// chunks, and the records they belong to.
//
// Positions refer to a *mirror*: the wanted parts of the archive, one behind the other, each at the
// beginning of a page.  A position in the mirror and its position in the archive are congruent
// modulo the page size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/format/archive.h"
#include "core/memory/buffer.h"

namespace ptsave {

// The largest chunk: no two threads fault in the same huge page.
inline constexpr std::size_t kMaxChunkNbytes = kHugePageNbytes;

// A record to read: its number in the index, and its payload's offset in the archive.
struct WantedRecord {
  std::size_t index;
  std::uint64_t payload_offset;
};

// A wanted record's place in the mirror: its local header begins at `header` and ends at `payload`.
struct Slot {
  std::size_t index = 0;
  std::size_t header = 0;
  std::size_t payload = 0;
  std::size_t end = 0;
};

// One unit of reading, a part of the mirror, and the slots with headers or payloads at least partly
// in it.
struct Chunk {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::uint64_t archive_offset = 0;
  std::size_t first_slot = 0;
  std::size_t end_slot = 0;

  std::uint64_t archive_position(std::size_t at) const { return archive_offset + (at - begin); }
};

struct TransferPlan {
  static constexpr std::uint32_t kNoSlot = 0xFFFFFFFF;

  std::vector<Slot> slots;                   // in file order
  std::vector<Chunk> chunks;                 // in file order
  std::vector<std::uint32_t> slot_by_index;  // kNoSlot for records that are not wanted
  std::size_t mirror_nbytes = 0;
  std::uint64_t nbytes_to_read = 0;  // payloads only

  // Throws std::out_of_range if record `index` is not wanted.
  std::size_t slot_number(std::size_t index) const;
  const Slot& slot_of(std::size_t index) const { return slots[slot_number(index)]; }
  // The number of the chunk that holds position `at` of the mirror.
  std::size_t chunk_at(std::size_t at) const;
};

// `records` may have any order, but must not include empty ones.
TransferPlan plan_transfer(const ArchiveIndex& index, std::vector<WantedRecord> records,
                           std::size_t page);

}  // namespace ptsave
