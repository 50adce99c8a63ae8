// Plans one transfer, as a pure function of the archive's index: the bytes to read, cut into
// chunks, and the records they belong to.  A Placement is their destination: fresh memory (Region)
// or existing memory (Scatter).
//
// Positions refer to a *mirror*: the wanted parts of the archive, one behind the other, each at the
// beginning of a page.  A position in the mirror and its position in the archive are congruent
// modulo the page size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/base/owner.h"
#include "core/format/archive.h"
#include "core/memory/buffer.h"
#include "core/pipeline/stager.h"

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

// Safe for concurrent use with different chunks.
class Placement {
 public:
  Placement() = default;
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;
  virtual ~Placement() = default;

  // Called before a chunk's first byte.
  virtual void prepare(const Chunk& chunk) = 0;

  // The memory for up to `nbytes` bytes from `at` on, if reading straight into it is worth a system
  // call; else empty: use a buffer.  `slot` is the first that ends behind `at`.
  virtual std::span<std::byte> window(const Slot& slot, std::size_t at, std::size_t nbytes) = 0;
  // The number of bytes from `at` on, at most `nbytes`, to read into a buffer before asking again.
  virtual std::size_t detour(const Slot& slot, std::size_t at, std::size_t nbytes) const = 0;

  // Takes bytes between the previous payload and the slot's payload.
  virtual void put_seam(const Slot& slot, std::size_t at, std::span<const std::byte> bytes) = 0;
  // Takes a part of the slot's payload; returns `crc` continued over `bytes`.
  virtual std::uint32_t put_payload(const Slot& slot, std::size_t at,
                                    std::span<const std::byte> bytes, std::uint32_t crc) = 0;

  // Called after a chunk's last byte.
  virtual void finish(const Chunk& chunk) = 0;

  // The slot's local header, after all its bytes have been put.
  virtual std::span<const std::byte> header(const Slot& slot) const = 0;
};

// A record's payload in memory and the owner of that memory.  The bytes are writable.
struct LoadedPayload {
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  OwnerReference owner;
};

// A part of a mirrored region whose memory returns to the system with its last owner.  Its address
// space is freed with the whole region.
class Segment final : public Owner {
 public:
  Segment(std::shared_ptr<Mapping> memory, std::size_t begin, std::size_t end)
      : memory_(std::move(memory)), begin_(begin), end_(end) {}

 private:
  ~Segment() override { memory_->discard(begin_, end_); }

  std::shared_ptr<Mapping> memory_;
  std::size_t begin_;
  std::size_t end_;
};

// The page-aligned beginnings of a region's segments; a segment ends where the next begins.  A page
// with records of two segments is a segment of its own; otherwise each segment would keep the next.
std::vector<std::size_t> segment_begins(std::span<const Slot> slots, std::size_t page);

// Memory that mirrors the wanted part of an archive, and is owned by the payloads.
//
// The region is one anonymous mapping, cut into segments: a record of 1 MiB or more has its own,
// and smaller neighbours share one of up to 4 MiB.  A storage owns the segments that its payload
// touches.  When a segment's last storage is freed, its pages return to the system at once; the
// address range is freed with the region's last storage.  So a small tensor that outlives its
// checkpoint keeps at most a few MiB of memory.
//
// The memory is mapped from the beginning; its pages come when they are filled.
class Region final : public Placement {
 public:
  // With `verify`, CRCs are computed as payloads arrive.
  Region(std::shared_ptr<const TransferPlan> plan, bool verify, Use use);

  const TransferPlan& plan() const { return *plan_; }
  // Throws std::out_of_range if record `index` has no place here.
  LoadedPayload payload(std::size_t index) const;
  // Returns a payload's whole pages to the system; they read as zero afterwards.
  void discard(std::size_t index) const;
  // Whether the memory at `place` belongs to the region.
  bool holds(const std::byte* place) const;
  // Makes the region's pages at `place` present.
  void make_present(const std::byte* place, std::size_t nbytes) const;

  void prepare(const Chunk& chunk) override;
  std::span<std::byte> window(const Slot& slot, std::size_t at, std::size_t nbytes) override;
  std::size_t detour(const Slot& slot, std::size_t at, std::size_t nbytes) const override;
  void put_seam(const Slot& slot, std::size_t at, std::span<const std::byte> bytes) override;
  std::uint32_t put_payload(const Slot& slot, std::size_t at, std::span<const std::byte> bytes,
                            std::uint32_t crc) override;
  void finish(const Chunk& /*chunk*/) override {}
  std::span<const std::byte> header(const Slot& slot) const override;

 private:
  std::shared_ptr<const TransferPlan> plan_;
  const bool verify_;
  std::shared_ptr<Mapping> memory_;
  std::vector<std::size_t> segment_begins_;
  std::vector<OwnerReference> segments_;
};

// A part of a record's payload and the memory it belongs in.  With `target`, the number of an
// Unstager's target, `place` only identifies the memory.
struct Destination {
  std::size_t record = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
  std::optional<std::size_t> target = std::nullopt;
};

// Makes memory[k] the place of the whole payload of records[k]; without memory, returns no
// destinations.  Throws std::invalid_argument if the sizes differ.
std::vector<Destination> whole_payloads(const ArchiveIndex& index,
                                        std::span<const std::size_t> records,
                                        std::span<const std::span<std::byte>> memory);

// Puts payloads into existing memory: the tensors of a model that is being restored, on the host or
// on accelerators.  Bytes of a payload without a destination are checksummed and dropped.  Only the
// local headers are kept.
class Scatter final : public Placement {
 public:
  // Destinations are not empty and lie within their records' payloads.  Throws
  // std::invalid_argument if destinations overlap in a record.  Their memory and `unstager`, which
  // targets need, must outlive this object.  `fresh` may be null; it is a region that may hold
  // destinations whose pages are not present yet.
  Scatter(std::shared_ptr<const TransferPlan> plan, const std::vector<Destination>& destinations,
          bool verify, std::shared_ptr<Region> fresh, Unstager* unstager);

  void prepare(const Chunk& chunk) override;
  std::span<std::byte> window(const Slot& slot, std::size_t at, std::size_t nbytes) override;
  std::size_t detour(const Slot& slot, std::size_t at, std::size_t nbytes) const override;
  void put_seam(const Slot& slot, std::size_t at, std::span<const std::byte> bytes) override;
  std::uint32_t put_payload(const Slot& slot, std::size_t at, std::span<const std::byte> bytes,
                            std::uint32_t crc) override;
  void finish(const Chunk& chunk) override;
  std::span<const std::byte> header(const Slot& slot) const override;

 private:
  // A destination in the mirror's coordinates.
  struct Extent {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::byte* place = nullptr;
    std::optional<std::size_t> target;
  };

  void make_present(const Chunk& chunk);
  // The address of the byte at `at` in the extent that holds it.
  std::byte* place_in(const Extent& extent, std::size_t at) const;
  std::vector<Unstager::Piece> pieces_of(const Chunk& chunk) const;
  std::size_t slot_number(const Slot& slot) const;
  // The extents of a slot that end behind `at`.
  std::span<const Extent> extents_from(const Slot& slot, std::size_t at) const;

  std::shared_ptr<const TransferPlan> plan_;
  const bool verify_;
  const std::shared_ptr<Region> fresh_;
  Unstager* const unstager_;
  std::vector<Extent> extents_;               // in the mirror's order
  std::vector<std::uint32_t> first_extents_;  // by slot, and one past the last
  std::vector<std::size_t> header_begins_;    // by slot, and one past the last
  std::vector<std::byte> headers_;
  // By chunk: the bytes that go on to accelerators, at their positions in the chunk, until the
  // chunk is complete.
  std::vector<std::unique_ptr<Lease>> leases_;
};

}  // namespace ptsave
