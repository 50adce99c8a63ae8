#include "core/read/placement.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/crc/crc32.h"
#include "core/memory/pages.h"

namespace ptsave {
namespace {

// Gaps between wanted records up to this size are cheaper to read than to skip.
constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{64} << 10;

// A contiguous part of the archive and its place in the mirror, both page-aligned.
struct Run {
  std::uint64_t archive_begin = 0;
  std::size_t mirror_begin = 0;
  std::size_t mirror_end = 0;
  std::size_t first_slot = 0;
};

std::vector<Run> place_records(const ArchiveIndex& index, const std::vector<WantedRecord>& records,
                               std::size_t page, TransferPlan& plan) {
  std::vector<Run> runs;
  std::uint64_t archive_end = 0;
  plan.slots.resize(records.size());
  plan.slot_by_index.assign(index.records().size(), TransferPlan::kNoSlot);
  for (std::size_t i = 0; i < records.size(); ++i) {
    const IndexedRecord& record = index.records()[records[i].index];
    const std::uint64_t begin = align_down(record.header_offset, page);
    if (runs.empty() || begin > align_up(archive_end, page) + kMaxGapNbytes) {
      const std::size_t mirror_begin = runs.empty() ? 0 : runs.back().mirror_end;
      runs.push_back({begin, mirror_begin, mirror_begin, i});
    }
    Run& run = runs.back();
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

void cut_chunks(const std::vector<Run>& runs, TransferPlan& plan) {
  const std::vector<Slot>& slots = plan.slots;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const Run& run = runs[r];
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

}  // namespace

std::size_t TransferPlan::slot_number(std::size_t index) const {
  if (slot_by_index.at(index) == kNoSlot) throw std::out_of_range("record is not being read");
  return slot_by_index[index];
}

std::size_t TransferPlan::chunk_at(std::size_t at) const {
  const auto next = std::ranges::upper_bound(chunks, at, {}, &Chunk::begin);
  return static_cast<std::size_t>(next - chunks.begin()) - 1;
}

TransferPlan plan_transfer(const ArchiveIndex& index, std::vector<WantedRecord> records,
                           std::size_t page) {
  if (!std::ranges::is_sorted(records, {}, &WantedRecord::payload_offset)) {
    std::ranges::sort(records, {}, &WantedRecord::payload_offset);
  }
  TransferPlan plan;
  cut_chunks(place_records(index, records, page, plan), plan);
  return plan;
}

namespace {

// Small neighbours share a segment of up to this size; one of a quarter of it has its own.
constexpr std::size_t kSegmentNbytes = std::size_t{4} << 20;

// Owns several segments, for a payload that spans more than one.
class Segments final : public Owner {
 public:
  explicit Segments(std::vector<OwnerReference> segments) : segments_(std::move(segments)) {}

 private:
  std::vector<OwnerReference> segments_;
};

}  // namespace

std::vector<std::size_t> segment_begins(std::span<const Slot> slots, std::size_t page) {
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

Region::Region(std::shared_ptr<const TransferPlan> plan, bool verify, Use use)
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

LoadedPayload Region::payload(std::size_t index) const {
  const Slot& slot = plan_->slot_of(index);
  const auto next = std::ranges::upper_bound(segment_begins_, slot.payload);
  const auto first = static_cast<std::size_t>(next - segment_begins_.begin()) - 1;
  std::size_t end = first + 1;
  while (end < segments_.size() && segment_begins_[end] < slot.end) ++end;
  LoadedPayload payload{memory_->data() + slot.payload, slot.end - slot.payload, segments_[first]};
  if (end > first + 1) {
    payload.owner =
        OwnerReference(new Segments({segments_.begin() + static_cast<std::ptrdiff_t>(first),
                                     segments_.begin() + static_cast<std::ptrdiff_t>(end)}));
  }
  return payload;
}

void Region::discard(std::size_t index) const {
  const Slot& slot = plan_->slot_of(index);
  memory_->discard(slot.payload, slot.end);
}

bool Region::holds(const std::byte* place) const {
  return place >= memory_->data() && place < memory_->data() + memory_->nbytes();
}

void Region::make_present(const std::byte* place, std::size_t nbytes) const {
  const auto at = static_cast<std::size_t>(place - memory_->data());
  memory_->populate(at, at + nbytes);
}

void Region::prepare(const Chunk& chunk) { memory_->populate(chunk.begin, chunk.end); }

std::span<std::byte> Region::window(const Slot& /*slot*/, std::size_t at, std::size_t nbytes) {
  return {memory_->data() + at, nbytes};
}

std::size_t Region::detour(const Slot& /*slot*/, std::size_t /*at*/, std::size_t nbytes) const {
  return nbytes;
}

void Region::put_seam(const Slot& /*slot*/, std::size_t at, std::span<const std::byte> bytes) {
  std::byte* const place = memory_->data() + at;
  if (bytes.data() != place) std::memcpy(place, bytes.data(), bytes.size());
}

std::uint32_t Region::put_payload(const Slot& slot, std::size_t at,
                                  std::span<const std::byte> bytes, std::uint32_t crc) {
  if (!verify_) {
    put_seam(slot, at, bytes);
    return 0;
  }
  std::byte* const place = memory_->data() + at;
  return bytes.data() == place ? crc32(crc, place, bytes.size())
                               : crc32_copy(crc, place, bytes.data(), bytes.size());
}

std::span<const std::byte> Region::header(const Slot& slot) const {
  return {memory_->data() + slot.header, slot.payload - slot.header};
}

namespace {

// A payload of at least this size is worth its own system call.  Smaller ones arrive together in a
// buffer and are copied, which takes less time.
constexpr std::size_t kMinWindowNbytes = std::size_t{32} << 10;

}  // namespace

std::vector<Destination> whole_payloads(const ArchiveIndex& index,
                                        std::span<const std::size_t> records,
                                        std::span<const std::span<std::byte>> memory) {
  if (memory.empty()) return {};
  if (memory.size() != records.size()) throw std::invalid_argument("a target for each record");
  std::vector<Destination> destinations;
  for (std::size_t k = 0; k < records.size(); ++k) {
    if (memory[k].size() != index.records()[records[k]].nbytes) {
      throw std::invalid_argument("a target has another size than its record");
    }
    if (memory[k].empty()) continue;
    destinations.push_back({records[k], 0, memory[k].size(), memory[k].data()});
  }
  return destinations;
}

Scatter::Scatter(std::shared_ptr<const TransferPlan> plan,
                 const std::vector<Destination>& destinations, bool verify,
                 std::shared_ptr<Region> fresh, Unstager* unstager)
    : plan_(std::move(plan)),
      verify_(verify),
      fresh_(std::move(fresh)),
      unstager_(unstager),
      leases_(plan_->chunks.size()) {
  extents_.reserve(destinations.size());
  for (const Destination& destination : destinations) {
    const Slot& slot = plan_->slot_of(destination.record);
    const std::size_t begin = slot.payload + destination.offset;
    extents_.push_back({begin, begin + destination.nbytes, destination.place, destination.target});
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

std::size_t Scatter::slot_number(const Slot& slot) const {
  return static_cast<std::size_t>(&slot - plan_->slots.data());
}

std::span<const Scatter::Extent> Scatter::extents_from(const Slot& slot, std::size_t at) const {
  const std::size_t number = slot_number(slot);
  const auto begin = extents_.begin() + first_extents_[number];
  const auto end = extents_.begin() + first_extents_[number + 1];
  return {
      std::upper_bound(begin, end, at, [](std::size_t x, const Extent& e) { return x < e.end; }),
      end};
}

std::byte* Scatter::place_in(const Extent& extent, std::size_t at) const {
  if (!extent.target) return extent.place + (at - extent.begin);
  const std::size_t chunk = plan_->chunk_at(at);
  return leases_[chunk]->data() + (at - plan_->chunks[chunk].begin);
}

std::vector<Unstager::Piece> Scatter::pieces_of(const Chunk& chunk) const {
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

void Scatter::prepare(const Chunk& chunk) {
  if (fresh_ != nullptr) make_present(chunk);
  if (unstager_ == nullptr || pieces_of(chunk).empty()) return;
  const auto number = static_cast<std::size_t>(&chunk - plan_->chunks.data());
  leases_[number] = unstager_->lease(chunk.end - chunk.begin);
}

void Scatter::finish(const Chunk& chunk) {
  const auto number = static_cast<std::size_t>(&chunk - plan_->chunks.data());
  if (leases_[number]) unstager_->send(std::move(leases_[number]), pieces_of(chunk));
}

// Otherwise a read would wait while the kernel finds and clears missing pages one by one.
void Scatter::make_present(const Chunk& chunk) {
  auto extent = std::ranges::upper_bound(extents_, chunk.begin, {}, &Extent::end);
  for (; extent != extents_.end() && extent->begin < chunk.end; ++extent) {
    const std::size_t begin = std::max(extent->begin, chunk.begin);
    const std::size_t nbytes = std::min(extent->end, chunk.end) - begin;
    if (extent->target) continue;
    const std::byte* const place = extent->place + (begin - extent->begin);
    if (nbytes >= kMinWindowNbytes && fresh_->holds(place)) fresh_->make_present(place, nbytes);
  }
}

std::span<std::byte> Scatter::window(const Slot& slot, std::size_t at, std::size_t nbytes) {
  const auto extents = extents_from(slot, at);
  if (extents.empty() || extents.front().begin > at) return {};
  const Extent& extent = extents.front();
  const std::size_t available = std::min(nbytes, extent.end - at);
  if (available < kMinWindowNbytes) return {};
  return {place_in(extent, at), available};
}

// Reads up to the next window: a large extent of this slot or a later one.
std::size_t Scatter::detour(const Slot& slot, std::size_t at, std::size_t nbytes) const {
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

void Scatter::put_seam(const Slot& slot, std::size_t at, std::span<const std::byte> bytes) {
  const std::size_t end = at + bytes.size();
  if (end <= slot.header) return;  // a data descriptor, or unwanted records
  const std::size_t skipped = slot.header > at ? slot.header - at : 0;
  const std::size_t place = header_begins_[slot_number(slot)] + (at + skipped - slot.header);
  std::memcpy(headers_.data() + place, bytes.data() + skipped, bytes.size() - skipped);
}

std::uint32_t Scatter::put_payload(const Slot& slot, std::size_t at,
                                   std::span<const std::byte> bytes, std::uint32_t crc) {
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

std::span<const std::byte> Scatter::header(const Slot& slot) const {
  const std::size_t number = slot_number(slot);
  return {headers_.data() + header_begins_[number],
          header_begins_[number + 1] - header_begins_[number]};
}

}  // namespace ptsave
