// Memory that mirrors the wanted part of an archive, and is owned by the payloads.
//
// The region is one anonymous mapping, cut into segments: a record of 1 MiB or more has its own,
// and smaller neighbours share one of up to 4 MiB.  A storage owns the segments that its payload
// touches.  When a segment's last storage is freed, its pages return to the system at once; the
// address range is freed with the region's last storage.  So a small tensor that outlives its
// checkpoint keeps at most a few MiB of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/owner.h"
#include "core/memory/buffer.h"
#include "core/read/placement.h"

namespace ptsave {

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

}  // namespace ptsave
