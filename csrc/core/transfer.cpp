#include "core/transfer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/crc32.h"
#include "core/error.h"

namespace ptsave {
namespace {

constexpr std::size_t kChunkNbytes = kHugePageNbytes;
// What it costs to make a small page present, and how much more than small pages huge ones may cost
// before they are given up: a part of what small pages would cost for the whole region, or a
// little.
constexpr std::chrono::nanoseconds kSmallPageTime{1200};
constexpr std::chrono::nanoseconds kMinLoss = std::chrono::milliseconds{6};
constexpr int kLossDivisor = 10;
// A gap between wanted records that is cheaper to read than to skip.
constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{64} << 10;
// Small neighbours share a segment of up to this size; a record of a quarter of it has its own.
constexpr std::size_t kSegmentNbytes = std::size_t{4} << 20;
// Below this a transfer is over before a thread has started.
constexpr std::uint64_t kThreadedNbytes = std::uint64_t{1} << 20;
constexpr std::uint32_t kNoSlot = 0xFFFFFFFF;

// Several segments, for a payload that lies in more than one.
class Segments final : public Owner {
 public:
  explicit Segments(std::vector<OwnerReference> segments) : segments_(std::move(segments)) {}

 private:
  std::vector<OwnerReference> segments_;
};

}  // namespace

Transfer::Transfer(const ArchiveSource& source, const ArchiveIndex& index,
                   std::vector<WantedRecord> records, std::size_t n_threads, bool verify)
    : source_(source),
      index_(index),
      verify_(verify),
      n_threads_(n_threads),
      slots_(records.size()) {
  if (!std::ranges::is_sorted(records, {}, &WantedRecord::payload_offset)) {
    std::ranges::sort(records, {}, &WantedRecord::payload_offset);
  }
  const std::vector<Run> runs = plan_runs(records);
  region_ = std::make_shared<Mapping>(runs.empty() ? 0 : runs.back().region_end);
  plan_chunks(runs);
  plan_segments();
  pipeline_ = std::make_unique<ChunkPipeline>(
      chunks_.size(), nbytes_to_read_ < kThreadedNbytes ? 0 : n_threads,
      [this](ChunkPipeline& /*pipeline*/, std::size_t number) { read_chunk(number); });
}

std::vector<Transfer::Run> Transfer::plan_runs(const std::vector<WantedRecord>& records) {
  std::vector<Run> runs;
  std::uint64_t archive_end = 0;
  slot_by_index_.assign(index_.records().size(), kNoSlot);
  for (std::size_t i = 0; i < records.size(); ++i) {
    const IndexedRecord& record = index_.records()[records[i].index];
    const std::uint64_t page = align_down(record.header_offset, kPageNbytes);
    if (runs.empty() || page > align_up(archive_end, kPageNbytes) + kMaxGapNbytes) {
      const std::size_t region_begin = runs.empty() ? 0 : runs.back().region_end;
      runs.push_back({page, region_begin, region_begin, i});
    }
    Run& run = runs.back();
    archive_end = records[i].payload_offset + record.nbytes;
    run.region_end = run.region_begin + align_up(archive_end - run.archive_begin, kPageNbytes);
    Slot& slot = slots_[i];
    slot.index = records[i].index;
    slot.header = run.region_begin + (record.header_offset - run.archive_begin);
    slot.payload = run.region_begin + (records[i].payload_offset - run.archive_begin);
    slot.end = slot.payload + record.nbytes;
    slot_by_index_[slot.index] = static_cast<std::uint32_t>(i);
    nbytes_to_read_ += record.nbytes;
  }
  return runs;
}

void Transfer::plan_chunks(const std::vector<Run>& runs) {
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const Run& run = runs[r];
    const std::size_t end_slot = r + 1 < runs.size() ? runs[r + 1].first_slot : slots_.size();
    const std::size_t run_end = slots_[end_slot - 1].end;
    std::size_t slot = run.first_slot;
    for (std::size_t begin = run.region_begin; begin < run_end;) {
      // Boundaries at multiples of the chunk size: no two threads fault in the same huge page.
      const std::size_t end = std::min(run_end, align_down(begin, kChunkNbytes) + kChunkNbytes);
      while (slots_[slot].end <= begin) ++slot;
      Chunk chunk{begin, end, run.archive_begin + (begin - run.region_begin), slot, slot};
      while (chunk.end_slot < end_slot && slots_[chunk.end_slot].header < end) {
        slots_[chunk.end_slot++].n_chunks_left.fetch_add(1, std::memory_order_relaxed);
      }
      chunks_.push_back(chunk);
      begin = end;
    }
  }
}

void Transfer::plan_segments() {
  const auto begin_segment = [this](std::size_t begin) {
    if (segment_begins_.empty() || begin > segment_begins_.back()) segment_begins_.push_back(begin);
  };
  std::size_t filled = 0;
  std::size_t previous_end = 0;
  bool alone = true;
  for (const Slot& slot : slots_) {
    const std::size_t nbytes = slot.end - slot.header;
    const bool large = nbytes >= kSegmentNbytes / 4;
    if (alone || large || filled + nbytes > kSegmentNbytes) {
      const std::size_t begin = align_down(slot.header, kPageNbytes);
      begin_segment(begin);
      // A page that two segments' records share is one of its own: else each would keep the next.
      if (previous_end > begin) begin_segment(begin + kPageNbytes);
      filled = 0;
    }
    filled += nbytes;
    previous_end = slot.end;
    alone = large;
  }
  for (std::size_t i = 0; i < segment_begins_.size(); ++i) {
    const std::size_t end =
        i + 1 < segment_begins_.size() ? segment_begins_[i + 1] : region_->nbytes();
    segments_.emplace_back(new Segment(region_, segment_begins_[i], end));
  }
}

// Takes a chunk's bytes as they arrive, front to back: checksums payloads, and copies what did not
// arrive in its place.
class Transfer::ChunkIntake {
 public:
  ChunkIntake(Transfer& transfer, Chunk& chunk)
      : transfer_(transfer), chunk_(chunk), at_(chunk.begin), slot_(chunk.first_slot) {}

  std::size_t at() const { return at_; }
  bool complete() const { return at_ == chunk_.end; }

  // The next `nbytes` bytes are at `from`, which is either their place in the region or elsewhere.
  void add(const std::byte* from, std::size_t nbytes) {
    const std::size_t end = at_ + nbytes;
    for (; slot_ < chunk_.end_slot; ++slot_) {
      Slot& slot = transfer_.slots_[slot_];
      from = take_seam(from, std::min(end, slot.payload));
      from = take_payload(from, std::min(end, slot.end));
      if (slot.end > end) return;
      record_piece(slot);
    }
    take_seam(from, end);
    at_ = end;
  }

  // The chunk's last payload goes on in the next one.
  void finish() {
    if (slot_ < chunk_.end_slot) record_piece(transfer_.slots_[slot_]);
  }

 private:
  const std::byte* take_seam(const std::byte* from, std::size_t end) {
    if (at_ >= end) return from;
    std::byte* const place = transfer_.region_->data() + at_;
    const std::size_t nbytes = end - std::exchange(at_, end);
    if (from != place) std::memcpy(place, from, nbytes);
    return from + nbytes;
  }

  const std::byte* take_payload(const std::byte* from, std::size_t end) {
    if (at_ >= end || !transfer_.verify_) return take_seam(from, end);
    std::byte* const place = transfer_.region_->data() + at_;
    const std::size_t nbytes = end - std::exchange(at_, end);
    crc_ = from == place ? crc32(crc_, from, nbytes) : crc32_copy(crc_, place, from, nbytes);
    return from + nbytes;
  }

  void record_piece(Slot& slot) {
    if (slot.payload < chunk_.begin) {
      chunk_.entering = crc_;
    } else if (slot.end > chunk_.end) {
      chunk_.leaving = crc_;
    } else {
      slot.actual_crc = crc_;
    }
    crc_ = 0;
  }

  Transfer& transfer_;
  Chunk& chunk_;
  std::size_t at_;
  std::size_t slot_;
  std::uint32_t crc_ = 0;
};

// Makes the chunk's pages present, and keeps account of what huge pages cost beside small ones.
// Normally they win fourfold.  But a virtual machine's host takes free memory back (balloon, free
// page reporting) by whole huge pages, and to get one again can take ten times as long as the small
// pages that the host has left alone.
void Transfer::fault_in(const Chunk& chunk) {
  const std::size_t begin = align_down(chunk.begin, kPageNbytes);
  const std::size_t end = align_up(chunk.end, kPageNbytes);
  const auto took = region_->populate(begin, end);
  const auto expected = kSmallPageTime * static_cast<std::int64_t>((end - begin) / kPageNbytes);
  const std::int64_t loss = (took - expected).count();
  // What was saved earlier is no reason to go on: only a recent loss counts.
  std::int64_t before = huge_page_loss_ns_.load(std::memory_order_relaxed);
  while (!huge_page_loss_ns_.compare_exchange_weak(before, std::max<std::int64_t>(before + loss, 0),
                                                   std::memory_order_relaxed)) {
  }
  const auto all_small =
      kSmallPageTime * static_cast<std::int64_t>(region_->nbytes() / kPageNbytes);
  const std::int64_t bearable = std::max(kMinLoss, all_small / kLossDivisor).count();
  if (before <= bearable && before + loss > bearable) region_->use_small_pages();
}

void Transfer::read_chunk(std::size_t number) {
  Chunk& chunk = chunks_[number];
  fault_in(chunk);
  ChunkIntake intake(*this, chunk);
  if (const std::byte* memory = source_.memory()) {
    intake.add(memory + chunk.archive_offset, chunk.end - chunk.begin);
  } else {
    // What the page cache holds comes from there; at the first gap the rest is read past it. Asking
    // first keeps the kernel from reading ahead what is about to be read directly.
    if (source_.may_be_cached(chunk.archive_offset, chunk.end - chunk.begin)) {
      read_cached(chunk, intake);
    }
    if (!intake.complete()) read_direct(chunk, intake);
    read_buffered(chunk, intake);
  }
  intake.finish();
  nbytes_read_.fetch_add(chunk.end - chunk.begin, std::memory_order_relaxed);
  for (std::size_t i = chunk.first_slot; i < chunk.end_slot; ++i) {
    if (slots_[i].n_chunks_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      finish_slot(slots_[i]);
  }
}

void Transfer::read_cached(const Chunk& chunk, ChunkIntake& intake) {
  while (!intake.complete()) {
    std::byte* const place = region_->data() + intake.at();
    const std::size_t wanted = std::min(kCachePieceNbytes, chunk.end - intake.at());
    const std::size_t cached =
        source_.read_cached(chunk.archive_position(intake.at()), place, wanted);
    intake.add(place, cached);
    if (cached < wanted) return;
  }
}

// Through a buffer: the disk writes faster into memory that is in use already than into fresh
// pages, by more than the copy costs, which checksums on the way.
void Transfer::read_direct(const Chunk& chunk, ChunkIntake& intake) {
  if (intake.at() % kPageNbytes != 0) return;
  std::call_once(buffers_made_, [this] {
    buffers_ = std::make_unique<BufferPool>(std::max<std::size_t>(n_threads_, 1), kChunkNbytes);
  });
  const BufferPool::Lease buffer(*buffers_);
  const std::size_t nbytes = chunk.end - intake.at();
  if (source_.read_direct(chunk.archive_position(intake.at()), buffer.data(),
                          align_up(nbytes, kPageNbytes))) {
    intake.add(buffer.data(), nbytes);
  }
}

void Transfer::read_buffered(const Chunk& chunk, ChunkIntake& intake) {
  while (!intake.complete()) {
    std::byte* const place = region_->data() + intake.at();
    const std::size_t wanted = std::min(kCachePieceNbytes, chunk.end - intake.at());
    source_.read_at(chunk.archive_position(intake.at()), place, wanted);
    intake.add(place, wanted);
  }
}

void Transfer::finish_slot(Slot& slot) {
  if (!header_agrees(slot)) throw LayoutMismatch(index_.records()[slot.index].name);
  if (verify_) {
    slot.actual_crc = combined_crc(slot);
    slot.damaged = slot.actual_crc != index_.records()[slot.index].crc;
  }
  slot.done.store(true, std::memory_order_release);
}

bool Transfer::header_agrees(const Slot& slot) const {
  const IndexedRecord& record = index_.records()[slot.index];
  const std::span header(region_->data() + slot.header, slot.payload - slot.header);
  try {
    const std::uint64_t promised = record.header_offset + (slot.payload - slot.header);
    return payload_offset(header, record, index_.root().size(), promised + record.nbytes) ==
           promised;
  } catch (const FormatError&) {
    return false;  // reading with exact offsets says what is wrong
  }
}

std::uint32_t Transfer::combined_crc(const Slot& slot) const {
  const auto chunk_of = [this](std::size_t at) {
    const auto next = std::ranges::upper_bound(chunks_, at, {}, &Chunk::begin);
    return static_cast<std::size_t>(next - chunks_.begin()) - 1;
  };
  const std::size_t first = chunk_of(slot.payload);
  const std::size_t last = chunk_of(slot.end - 1);
  if (first == last) return slot.actual_crc;
  std::uint32_t crc = chunks_[first].leaving;
  for (std::size_t c = first + 1; c <= last; ++c) {
    const std::size_t end = std::min(chunks_[c].end, slot.end);
    crc = crc32_combine(crc, chunks_[c].entering, end - chunks_[c].begin);
  }
  return crc;
}

const Transfer::Slot& Transfer::slot_of(std::size_t index) const {
  if (slot_by_index_.at(index) == kNoSlot) throw std::out_of_range("record is not being read");
  return slots_[slot_by_index_[index]];
}

DamagedRecord Transfer::damage(const Slot& slot) const {
  const IndexedRecord& record = index_.records()[slot.index];
  return {record.name, record.header_offset + (slot.payload - slot.header), record.crc,
          slot.actual_crc};
}

void Transfer::wait(std::size_t index, const Poll& poll) {
  const Slot& slot = slot_of(index);
  if (slot.done.load(std::memory_order_acquire)) return;
  pipeline_->wait_until([&] { return slot.done.load(std::memory_order_acquire); }, poll);
}

std::vector<DamagedRecord> Transfer::wait_all(const Poll& poll) {
  pipeline_->finish(poll);
  std::vector<DamagedRecord> damaged;
  for (const Slot& slot : slots_) {
    if (slot.damaged) damaged.push_back(damage(slot));
  }
  return damaged;
}

LoadedPayload Transfer::payload(std::size_t index) const {
  const Slot& slot = slot_of(index);
  const auto next = std::ranges::upper_bound(segment_begins_, slot.payload);
  const auto first = static_cast<std::size_t>(next - segment_begins_.begin()) - 1;
  std::size_t end = first + 1;
  while (end < segments_.size() && segment_begins_[end] < slot.end) ++end;
  LoadedPayload payload{region_->data() + slot.payload, slot.end - slot.payload, segments_[first]};
  if (end > first + 1) {
    payload.owner =
        OwnerReference(new Segments({segments_.begin() + static_cast<std::ptrdiff_t>(first),
                                     segments_.begin() + static_cast<std::ptrdiff_t>(end)}));
  }
  return payload;
}

}  // namespace ptsave
