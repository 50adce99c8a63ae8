#include "core/read/scatter.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/crc/crc32.h"

namespace ptsave {
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
