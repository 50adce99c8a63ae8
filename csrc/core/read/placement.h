// Plans one transfer, as a pure function of the archive's index: the bytes to read, cut into
// chunks, and the records they belong to.  A Placement is the bytes' destination: fresh memory
// (Region) or existing memory (Scatter).
//
// Positions refer to a *mirror*: the wanted parts of the archive, one behind the other, each at the
// beginning of a page.  A position in the mirror and its position in the archive are congruent
// modulo the page size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/base/owner.h"
#include "core/crc/crc32.h"
#include "core/format/archive.h"
#include "core/memory/buffer.h"
#include "core/memory/pages.h"
#include "core/pipeline/stager.h"
#include "core/read/reader.h"

namespace ptsave {

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

// One unit of reading: a part of the mirror, and the slots whose headers or payloads overlap it.
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
  std::size_t slot_number(std::size_t index) const {
    if (slot_by_index.at(index) == kNoSlot) throw std::out_of_range("record is not being read");
    return slot_by_index[index];
  }
  const Slot& slot_of(std::size_t index) const { return slots[slot_number(index)]; }
  // The number of the chunk that holds position `at` of the mirror.
  std::size_t chunk_at(std::size_t at) const {
    const auto next = std::ranges::upper_bound(chunks, at, {}, &Chunk::begin);
    return static_cast<std::size_t>(next - chunks.begin()) - 1;
  }
};

// Gaps between wanted records up to this size are cheaper to read than to skip.
inline constexpr std::uint64_t kMaxSkippedNbytes = std::uint64_t{64} << 10;

// A contiguous part of the archive and its place in the mirror, both page-aligned.
struct MirrorRun {
  std::uint64_t archive_begin = 0;
  std::size_t mirror_begin = 0;
  std::size_t mirror_end = 0;
  std::size_t first_slot = 0;
};

inline std::vector<MirrorRun> place_records(const ArchiveIndex& index,
                                            const std::vector<WantedRecord>& records,
                                            std::size_t page, TransferPlan& plan) {
  std::vector<MirrorRun> runs;
  std::uint64_t archive_end = 0;
  plan.slots.resize(records.size());
  plan.slot_by_index.assign(index.records().size(), TransferPlan::kNoSlot);
  for (std::size_t i = 0; i < records.size(); ++i) {
    const IndexedRecord& record = index.records()[records[i].index];
    const std::uint64_t begin = align_down(record.header_offset, page);
    if (runs.empty() || begin > align_up(archive_end, page) + kMaxSkippedNbytes) {
      const std::size_t mirror_begin = runs.empty() ? 0 : runs.back().mirror_end;
      runs.push_back({begin, mirror_begin, mirror_begin, i});
    }
    MirrorRun& run = runs.back();
    archive_end = records[i].payload_offset + record.nbytes;
    run.mirror_end = run.mirror_begin + align_up(archive_end - run.archive_begin, page);
    Slot& slot = plan.slots[i];
    slot.index = records[i].index;
    slot.header = run.mirror_begin + (record.header_offset - run.archive_begin);
    slot.payload = run.mirror_begin + (records[i].payload_offset - run.archive_begin);
    slot.end = slot.payload + record.nbytes;
    plan.slot_by_index[slot.index] = static_cast<std::uint32_t>(i);
    plan.nbytes_to_read += record.nbytes;
  }
  plan.mirror_nbytes = runs.empty() ? 0 : runs.back().mirror_end;
  return runs;
}

inline void cut_chunks(const std::vector<MirrorRun>& runs, TransferPlan& plan) {
  const std::vector<Slot>& slots = plan.slots;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const MirrorRun& run = runs[r];
    const std::size_t end_slot = r + 1 < runs.size() ? runs[r + 1].first_slot : slots.size();
    const std::size_t run_end = slots[end_slot - 1].end;
    std::size_t slot = run.first_slot;
    for (std::size_t begin = run.mirror_begin; begin < run_end;) {
      // Boundaries at multiples of the chunk size.
      const std::size_t end =
          std::min(run_end, align_down(begin, kMaxChunkNbytes) + kMaxChunkNbytes);
      while (slots[slot].end <= begin) ++slot;
      Chunk chunk{begin, end, run.archive_begin + (begin - run.mirror_begin), slot, slot};
      while (chunk.end_slot < end_slot && slots[chunk.end_slot].header < end) ++chunk.end_slot;
      plan.chunks.push_back(chunk);
      begin = end;
    }
  }
}

// `records` may have any order, but must not include empty ones.
inline TransferPlan plan_transfer(const ArchiveIndex& index, std::vector<WantedRecord> records,
                                  std::size_t page) {
  if (!std::ranges::is_sorted(records, {}, &WantedRecord::payload_offset)) {
    std::ranges::sort(records, {}, &WantedRecord::payload_offset);
  }
  TransferPlan plan;
  cut_chunks(place_records(index, records, page, plan), plan);
  return plan;
}

// The destination of a transfer.  Safe for concurrent use with different chunks.
class Placement : public Interface {
 public:
  // Called before a chunk's first byte.
  virtual void prepare(const Chunk& chunk) = 0;

  // The memory for up to `nbytes` bytes from `at` on, if reading straight into it is worth a system
  // call.  Otherwise empty: use a buffer.  `slot` is the first slot that ends after `at`.
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

// A part of a mirrored region.  When its last owner is destroyed, its pages return to the system.
// Its addresses stay reserved until the whole region is destroyed.
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

// Owns several segments, for a payload that spans more than one.
class Segments final : public Owner {
 public:
  explicit Segments(std::vector<OwnerReference> segments) : segments_(std::move(segments)) {}

 private:
  std::vector<OwnerReference> segments_;
};

// The page-aligned beginnings of a region's segments; a segment ends where the next begins.  A page
// with records of two segments is a segment of its own; otherwise each segment would keep the next
// one in memory.
inline std::vector<std::size_t> segment_begins(std::span<const Slot> slots, std::size_t page) {
  // Small neighbours share a segment of up to this size.  A record of at least a quarter of this
  // size has its own segment.
  constexpr std::size_t kSegmentNbytes = std::size_t{4} << 20;
  std::vector<std::size_t> begins;
  const auto begin_segment = [&](std::size_t begin) {
    if (begins.empty() || begin > begins.back()) begins.push_back(begin);
  };
  std::size_t filled = 0;
  std::size_t previous_end = 0;
  bool alone = true;
  for (const Slot& slot : slots) {
    const std::size_t nbytes = slot.end - slot.header;
    const bool large = nbytes >= kSegmentNbytes / 4;
    if (alone || large || filled + nbytes > kSegmentNbytes) {
      const std::size_t begin = align_down(slot.header, page);
      begin_segment(begin);
      if (previous_end > begin) begin_segment(begin + page);
      filled = 0;
    }
    filled += nbytes;
    previous_end = slot.end;
    alone = large;
  }
  return begins;
}

// Memory that mirrors the wanted part of an archive.  The loaded payloads own it.
//
// The region is one anonymous mapping, cut into segments: a record of 1 MiB or more has its own
// segment, and smaller neighbours share a segment of up to 4 MiB.  A storage owns the segments that
// its payload touches.  When a segment's last storage is freed, its pages return to the system at
// once; the address range is freed with the region's last storage.  So a small tensor that outlives
// its checkpoint keeps at most a few MiB of memory.
//
// The memory is mapped at once; its pages become present when they are filled.
class Region final : public Placement {
 public:
  // With `verify`, CRCs are computed as payloads arrive.
  Region(std::shared_ptr<const TransferPlan> plan, bool verify, Use use)
      : plan_(std::move(plan)),
        verify_(verify),
        memory_(std::make_shared<Mapping>(plan_->mirror_nbytes, use)),
        segment_begins_(segment_begins(plan_->slots, page_nbytes())) {
    for (std::size_t i = 0; i < segment_begins_.size(); ++i) {
      const std::size_t end =
          i + 1 < segment_begins_.size() ? segment_begins_[i + 1] : memory_->nbytes();
      segments_.emplace_back(new Segment(memory_, segment_begins_[i], end));
    }
  }

  const TransferPlan& plan() const { return *plan_; }

  // Throws std::out_of_range if record `index` has no place here.
  LoadedPayload payload(std::size_t index) const {
    const Slot& slot = plan_->slot_of(index);
    const auto next = std::ranges::upper_bound(segment_begins_, slot.payload);
    const auto first = static_cast<std::size_t>(next - segment_begins_.begin()) - 1;
    std::size_t end = first + 1;
    while (end < segments_.size() && segment_begins_[end] < slot.end) ++end;
    LoadedPayload payload{memory_->data() + slot.payload, slot.end - slot.payload,
                          segments_[first]};
    if (end > first + 1) {
      payload.owner =
          OwnerReference(new Segments({segments_.begin() + static_cast<std::ptrdiff_t>(first),
                                       segments_.begin() + static_cast<std::ptrdiff_t>(end)}));
    }
    return payload;
  }

  // Returns a payload's whole pages to the system; they read as zero afterwards.
  void discard(std::size_t index) const {
    const Slot& slot = plan_->slot_of(index);
    memory_->discard(slot.payload, slot.end);
  }
  // Whether the memory at `place` belongs to the region.
  bool holds(const std::byte* place) const {
    return place >= memory_->data() && place < memory_->data() + memory_->nbytes();
  }
  // Makes the region's pages at `place` present.
  void make_present(const std::byte* place, std::size_t nbytes) const {
    const auto at = static_cast<std::size_t>(place - memory_->data());
    memory_->populate(at, at + nbytes);
  }

  void prepare(const Chunk& chunk) override { memory_->populate(chunk.begin, chunk.end); }
  std::span<std::byte> window(const Slot& /*slot*/, std::size_t at, std::size_t nbytes) override {
    return {memory_->data() + at, nbytes};
  }
  std::size_t detour(const Slot& /*slot*/, std::size_t /*at*/, std::size_t nbytes) const override {
    return nbytes;
  }
  void put_seam(const Slot& /*slot*/, std::size_t at, std::span<const std::byte> bytes) override {
    std::byte* const place = memory_->data() + at;
    if (bytes.data() != place) std::memcpy(place, bytes.data(), bytes.size());
  }
  std::uint32_t put_payload(const Slot& slot, std::size_t at, std::span<const std::byte> bytes,
                            std::uint32_t crc) override {
    if (!verify_) {
      put_seam(slot, at, bytes);
      return 0;
    }
    std::byte* const place = memory_->data() + at;
    return bytes.data() == place ? crc32(crc, place, bytes.size())
                                 : crc32_copy(crc, place, bytes.data(), bytes.size());
  }
  void finish(const Chunk& /*chunk*/) override {}
  std::span<const std::byte> header(const Slot& slot) const override {
    return {memory_->data() + slot.header, slot.payload - slot.header};
  }

 private:
  std::shared_ptr<const TransferPlan> plan_;
  const bool verify_;
  std::shared_ptr<Mapping> memory_;
  std::vector<std::size_t> segment_begins_;
  std::vector<OwnerReference> segments_;
};

// Puts payloads into existing memory: the tensors of a model that is being restored, on the host or
// on accelerators.  Bytes of a payload without a destination are checksummed and dropped.  Only the
// local headers are kept.
class Scatter final : public Placement {
 public:
  // Destinations are not empty and lie within their records' payloads.  Throws
  // std::invalid_argument if destinations overlap in a record.  Their memory, and `unstager` if
  // there are targets on accelerators, must outlive this object.  `fresh`, which may be null, is a
  // region that may hold destinations whose pages are not present yet.
  Scatter(std::shared_ptr<const TransferPlan> plan, const std::vector<Destination>& destinations,
          bool verify, std::shared_ptr<Region> fresh, Unstager* unstager)
      : plan_(std::move(plan)),
        verify_(verify),
        fresh_(std::move(fresh)),
        unstager_(unstager),
        leases_(plan_->chunks.size()) {
    extents_.reserve(destinations.size());
    for (const Destination& destination : destinations) {
      const Slot& slot = plan_->slot_of(destination.record);
      const std::size_t begin = slot.payload + destination.offset;
      extents_.push_back(
          {begin, begin + destination.nbytes, destination.place, destination.target});
    }
    if (!std::ranges::is_sorted(extents_, {}, &Extent::begin)) {
      std::ranges::sort(extents_, {}, &Extent::begin);
    }
    const auto overlap = [](const Extent& a, const Extent& b) { return a.end > b.begin; };
    if (std::ranges::adjacent_find(extents_, overlap) != extents_.end()) {
      throw std::invalid_argument("destinations of a record overlap");
    }
    std::size_t extent = 0;
    std::size_t headers_nbytes = 0;
    for (const Slot& slot : plan_->slots) {
      first_extents_.push_back(static_cast<std::uint32_t>(extent));
      header_begins_.push_back(headers_nbytes);
      while (extent < extents_.size() && extents_[extent].begin < slot.end) ++extent;
      headers_nbytes += slot.payload - slot.header;
    }
    first_extents_.push_back(static_cast<std::uint32_t>(extent));
    header_begins_.push_back(headers_nbytes);
    headers_.resize(headers_nbytes);
  }

  void prepare(const Chunk& chunk) override {
    if (fresh_ != nullptr) make_present(chunk);
    if (unstager_ == nullptr || pieces_of(chunk).empty()) return;
    const auto number = static_cast<std::size_t>(&chunk - plan_->chunks.data());
    leases_[number] = unstager_->lease(chunk.end - chunk.begin);
  }
  std::span<std::byte> window(const Slot& slot, std::size_t at, std::size_t nbytes) override {
    const auto extents = extents_from(slot, at);
    if (extents.empty() || extents.front().begin > at) return {};
    const Extent& extent = extents.front();
    const std::size_t available = std::min(nbytes, extent.end - at);
    if (available < kMinWindowNbytes) return {};
    return {place_in(extent, at), available};
  }
  // Reads up to the next window: a large extent of this slot or a later one.
  std::size_t detour(const Slot& slot, std::size_t at, std::size_t nbytes) const override {
    const std::size_t end = at + nbytes;
    const auto ours = extents_from(slot, at);
    const Extent* extent = ours.data();
    const Extent* const last = extents_.data() + extents_.size();
    for (; extent != last && extent->begin < end; ++extent) {
      if (extent->begin > at && extent->end - extent->begin >= kMinWindowNbytes) {
        return extent->begin - at;
      }
    }
    return nbytes;
  }

  void put_seam(const Slot& slot, std::size_t at, std::span<const std::byte> bytes) override {
    const std::size_t end = at + bytes.size();
    if (end <= slot.header) return;  // a data descriptor, or unwanted records
    const std::size_t skipped = slot.header > at ? slot.header - at : 0;
    const std::size_t place = header_begins_[slot_number(slot)] + (at + skipped - slot.header);
    std::memcpy(headers_.data() + place, bytes.data() + skipped, bytes.size() - skipped);
  }
  std::uint32_t put_payload(const Slot& slot, std::size_t at, std::span<const std::byte> bytes,
                            std::uint32_t crc) override {
    const auto take = [&](std::size_t nbytes, std::byte* place) {
      const std::byte* const from = bytes.data();
      if (place != nullptr && place != from) {
        if (verify_) {
          crc = crc32_copy(crc, place, from, nbytes);
        } else {
          std::memcpy(place, from, nbytes);
        }
      } else if (verify_) {
        crc = crc32(crc, from, nbytes);
      }
      bytes = bytes.subspan(nbytes);
      at += nbytes;
    };
    for (const Extent& extent : extents_from(slot, at)) {
      if (extent.begin > at) take(std::min(bytes.size(), extent.begin - at), nullptr);
      if (bytes.empty()) break;
      take(std::min(bytes.size(), extent.end - at), place_in(extent, at));
      if (bytes.empty()) break;
    }
    if (!bytes.empty()) take(bytes.size(), nullptr);
    return crc;
  }

  void finish(const Chunk& chunk) override {
    const auto number = static_cast<std::size_t>(&chunk - plan_->chunks.data());
    if (leases_[number]) unstager_->send(std::move(leases_[number]), pieces_of(chunk));
  }
  std::span<const std::byte> header(const Slot& slot) const override {
    const std::size_t number = slot_number(slot);
    return {headers_.data() + header_begins_[number],
            header_begins_[number + 1] - header_begins_[number]};
  }

 private:
  // A payload of at least this size is worth its own system call.  Smaller ones arrive together in
  // a buffer and are copied, which takes less time.
  static constexpr std::size_t kMinWindowNbytes = std::size_t{32} << 10;

  // A destination in the mirror's coordinates.
  struct Extent {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::byte* place = nullptr;
    std::optional<std::size_t> target;
  };

  // Makes missing pages present in advance.  Otherwise a read would wait while the kernel finds and
  // clears them one by one.
  void make_present(const Chunk& chunk) {
    auto extent = std::ranges::upper_bound(extents_, chunk.begin, {}, &Extent::end);
    for (; extent != extents_.end() && extent->begin < chunk.end; ++extent) {
      const std::size_t begin = std::max(extent->begin, chunk.begin);
      const std::size_t nbytes = std::min(extent->end, chunk.end) - begin;
      if (extent->target) continue;
      const std::byte* const place = extent->place + (begin - extent->begin);
      if (nbytes >= kMinWindowNbytes && fresh_->holds(place)) fresh_->make_present(place, nbytes);
    }
  }

  // The address of the byte at `at` in the extent that holds it.
  std::byte* place_in(const Extent& extent, std::size_t at) const {
    if (!extent.target) return extent.place + (at - extent.begin);
    const std::size_t chunk = plan_->chunk_at(at);
    return leases_[chunk]->data() + (at - plan_->chunks[chunk].begin);
  }
  std::vector<Unstager::Piece> pieces_of(const Chunk& chunk) const {
    std::vector<Unstager::Piece> pieces;
    auto extent = std::ranges::upper_bound(extents_, chunk.begin, {}, &Extent::end);
    for (; extent != extents_.end() && extent->begin < chunk.end; ++extent) {
      if (!extent->target) continue;
      const std::size_t begin = std::max(extent->begin, chunk.begin);
      const std::size_t end = std::min(extent->end, chunk.end);
      pieces.push_back({*extent->target, begin - extent->begin, begin - chunk.begin, end - begin});
    }
    return pieces;
  }

  std::size_t slot_number(const Slot& slot) const {
    return static_cast<std::size_t>(&slot - plan_->slots.data());
  }
  // The extents of a slot that end after `at`.
  std::span<const Extent> extents_from(const Slot& slot, std::size_t at) const {
    const std::size_t number = slot_number(slot);
    const auto begin = extents_.begin() + first_extents_[number];
    const auto end = extents_.begin() + first_extents_[number + 1];
    return {
        std::upper_bound(begin, end, at, [](std::size_t x, const Extent& e) { return x < e.end; }),
        end};
  }

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
