#include "core/read/region.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/crc/crc32.h"
#include "core/memory/pages.h"

namespace ptsave {
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

}  // namespace ptsave
