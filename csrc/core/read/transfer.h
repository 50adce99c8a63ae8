// One load in progress: workers read an archive chunk by chunk into a Placement, and check each
// piece while its bytes are in the cache.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/pipeline.h"
#include "core/read/placement.h"
#include "core/read/reader.h"

namespace ptsave {

class Transfer {
 public:
  // Starts reading at once; compares CRCs if `verify`.  Both `source` and `index` must outlive this
  // object.
  Transfer(const ByteSource& source, const ArchiveIndex& index,
           std::shared_ptr<const TransferPlan> plan, std::shared_ptr<Placement> placement,
           std::size_t n_threads, bool verify)
      : source_(source),
        index_(index),
        plan_(std::move(plan)),
        placement_(std::move(placement)),
        verify_(verify),
        n_threads_(n_threads),
        read_slots_(n_threads),
        progress_(plan_->slots.size()),
        cut_crcs_(plan_->chunks.size()) {
    for (const Chunk& chunk : plan_->chunks) {
      for (std::size_t i = chunk.first_slot; i < chunk.end_slot; ++i) {
        progress_[i].n_chunks_left.fetch_add(1, std::memory_order_relaxed);
      }
    }
    pipeline_ = std::make_unique<ChunkPipeline>(
        plan_->chunks.size(), nbytes_to_read() < kThreadedNbytes ? 0 : n_threads,
        [this](ChunkPipeline& /*pipeline*/, std::size_t number) { read_chunk(number); });
  }

  void wait(std::size_t index, const Poll& poll) {
    const Progress& progress = progress_[plan_->slot_number(index)];
    if (progress.done.load(std::memory_order_acquire)) return;
    pipeline_->wait_until([&] { return progress.done.load(std::memory_order_acquire); }, poll);
  }
  std::vector<DamagedRecord> wait_all(const Poll& poll) {
    pipeline_->finish(poll);
    std::vector<DamagedRecord> damaged;
    for (std::size_t i = 0; i < progress_.size(); ++i) {
      if (progress_[i].damaged) damaged.push_back(damage(i));
    }
    return damaged;
  }
  void cancel() { pipeline_.reset(); }
  // Records whose payloads have been put at least in part, in file order.  Call it after cancel()
  // or wait_all(), even if that threw.
  std::vector<std::size_t> begun() const {
    std::vector<std::size_t> records;
    for (std::size_t i = 0; i < progress_.size(); ++i) {
      if (progress_[i].begun.load(std::memory_order_relaxed)) {
        records.push_back(plan_->slots[i].index);
      }
    }
    return records;
  }

  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }
  std::uint64_t nbytes_to_read() const { return plan_->nbytes_to_read; }

 private:
  // `n_chunks_left` counts the unfinished chunks with a part of the record or its local header.
  struct Progress {
    std::atomic<std::uint32_t> n_chunks_left{0};
    std::atomic<bool> begun{false};
    std::atomic<bool> done{false};
    bool header_checked = false;
    bool damaged = false;
    std::uint32_t actual_crc = 0;
  };
  // CRCs of the pieces of records that cross a chunk's boundaries.
  struct CutCrcs {
    std::uint32_t entering = 0;
    std::uint32_t leaving = 0;
  };

  // Takes a chunk's bytes in order, and passes them on record by record.
  class ChunkIntake {
   public:
    ChunkIntake(Transfer& transfer, std::size_t number)
        : transfer_(transfer),
          chunk_(transfer.plan_->chunks[number]),
          cut_crcs_(transfer.cut_crcs_[number]),
          at_(chunk_.begin),
          slot_(chunk_.first_slot) {}

    std::size_t at() const { return at_; }
    std::size_t nbytes_left() const { return chunk_.end - at_; }
    bool complete() const { return at_ == chunk_.end; }
    // The slot that holds the next byte, or the next slot after that byte; the last slot if there
    // is none.
    const Slot& slot() const { return slots()[std::min(slot_, slots().size() - 1)]; }

    // Tells the intake that the next bytes are read straight to a payload's place.
    void begin_payload() {
      if (slot_ < chunk_.end_slot && at_ >= slots()[slot_].payload) {
        transfer_.progress_[slot_].begun.store(true, std::memory_order_relaxed);
      }
    }

    // Takes the next `nbytes` bytes from `from`, which may already be their place.
    void add(const std::byte* from, std::size_t nbytes) {
      const std::size_t end = at_ + nbytes;
      for (; slot_ < chunk_.end_slot; ++slot_) {
        const Slot& slot = slots()[slot_];
        from = take_seam(from, std::min(end, slot.payload));
        if (end > slot.payload) from = take_payload(from, std::min(end, slot.end));
        if (slot.end > end) return;
        record_piece(slot);
      }
      at_ = end;
    }

    // Records the last payload's piece, if that payload continues in the next chunk.
    void finish() {
      if (slot_ < chunk_.end_slot) record_piece(slots()[slot_]);
    }

   private:
    const std::vector<Slot>& slots() const { return transfer_.plan_->slots; }

    const std::byte* take_seam(const std::byte* from, std::size_t end) {
      if (at_ >= end) return from;
      const Slot& slot = slots()[slot_];
      const std::size_t nbytes = end - at_;
      transfer_.placement_->put_seam(slot, at_, {from, nbytes});
      at_ = end;
      // A header that began in the previous chunk may be incomplete; it is checked at the end.
      if (end == slot.payload && slot.header >= chunk_.begin) transfer_.check_header(slot_);
      return from + nbytes;
    }

    const std::byte* take_payload(const std::byte* from, std::size_t end) {
      if (at_ >= end) return from;
      const std::size_t nbytes = end - at_;
      transfer_.progress_[slot_].begun.store(true, std::memory_order_relaxed);
      crc_ = transfer_.placement_->put_payload(slots()[slot_], at_, {from, nbytes}, crc_);
      at_ = end;
      return from + nbytes;
    }

    void record_piece(const Slot& slot) {
      if (slot.payload < chunk_.begin) {
        cut_crcs_.entering = crc_;
      } else if (slot.end > chunk_.end) {
        cut_crcs_.leaving = crc_;
      } else {
        transfer_.progress_[slot_].actual_crc = crc_;
      }
      crc_ = 0;
    }

    Transfer& transfer_;
    const Chunk& chunk_;
    CutCrcs& cut_crcs_;
    std::size_t at_;
    std::size_t slot_;
    std::uint32_t crc_ = 0;
  };

  void read_chunk(std::size_t number) {
    const Chunk& chunk = plan_->chunks[number];
    placement_->prepare(chunk);
    ChunkIntake intake(*this, number);
    if (const std::byte* memory = source_.memory()) {
      intake.add(memory + chunk.archive_offset, chunk.end - chunk.begin);
    } else {
      // Read from the page cache up to the first missing byte, and the rest from the disk.  Asking
      // first prevents the kernel from reading ahead bytes that will be read past the cache.
      if (source_.may_be_cached(chunk.archive_offset, chunk.end - chunk.begin)) {
        read_cached(chunk, intake);
      }
      if (!intake.complete()) read_direct(chunk, intake);
      if (!intake.complete()) read_buffered(chunk, intake);
    }
    intake.finish();
    placement_->finish(chunk);
    nbytes_read_.fetch_add(chunk.end - chunk.begin, std::memory_order_relaxed);
    for (std::size_t i = chunk.first_slot; i < chunk.end_slot; ++i) {
      if (progress_[i].n_chunks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_slot(i);
    }
  }

  // Reads straight into place if that is worth a system call, and otherwise through a buffer.
  void read_cached(const Chunk& chunk, ChunkIntake& intake) {
    read_pieces(intake, [&](std::byte* to, std::size_t nbytes) {
      return source_.read_cached(chunk.archive_position(intake.at()), to, nbytes);
    });
  }
  // Reads through a buffer, because the disk writes faster into used memory than into fresh pages.
  // That saves more than the copy costs, and the copy computes the checksum.
  void read_direct(const Chunk& chunk, ChunkIntake& intake) {
    const std::uint64_t offset = chunk.archive_position(intake.at());
    const std::size_t block = source_.block_nbytes();
    if (offset % block != 0) return;
    BufferPool* pool = nullptr;
    try {
      pool = &buffers();
    } catch (const std::bad_alloc&) {
      return;  // read_buffered() reads large payloads without a buffer
    }
    const BufferPool::Lease buffer(*pool);
    const std::size_t nbytes = intake.nbytes_left();
    const bool was_read = [&] {
      const std::lock_guard slot(read_slots_);
      return source_.read_direct(offset, buffer.data(), align_up(nbytes, block));
    }();
    if (was_read) intake.add(buffer.data(), nbytes);
  }

  void read_buffered(const Chunk& chunk, ChunkIntake& intake) {
    const std::lock_guard slot(read_slots_);
    source_.read_ahead(chunk.archive_position(intake.at()), intake.nbytes_left());
    read_pieces(intake, [&](std::byte* to, std::size_t nbytes) {
      source_.read_at(chunk.archive_position(intake.at()), to, nbytes);
      return nbytes;
    });
  }
  // `read` returns the number of bytes it has put there; a short read ends the loop.
  template <class Read>
  void read_pieces(ChunkIntake& intake, const Read& read) {
    while (!intake.complete()) {
      const std::size_t nbytes = std::min(kCachePieceNbytes, intake.nbytes_left());
      const std::span<std::byte> window = placement_->window(intake.slot(), intake.at(), nbytes);
      if (!window.empty()) {
        intake.begin_payload();
        const std::size_t n = read(window.data(), window.size());
        intake.add(window.data(), n);
        if (n < window.size()) return;
      } else {
        const std::size_t wanted = placement_->detour(intake.slot(), intake.at(), nbytes);
        const BufferPool::Lease buffer(buffers());
        const std::size_t n = read(buffer.data(), wanted);
        intake.add(buffer.data(), n);
        if (n < wanted) return;
      }
    }
  }

  BufferPool& buffers() {
    const std::lock_guard lock(buffers_mutex_);  // not call_once: retried after a lack of memory
    if (buffers_ == nullptr) {
      buffers_ = std::make_unique<BufferPool>(std::max<std::size_t>(n_threads_, 1), kHugePageNbytes,
                                              Count::kUpTo);
    }
    return *buffers_;
  }
  void check_header(std::size_t number) {
    const Slot& slot = plan_->slots[number];
    if (!header_agrees(slot)) throw LayoutMismatch(index_.records()[slot.index].name);
    progress_[number].header_checked = true;
  }
  void finish_slot(std::size_t number) {
    Progress& progress = progress_[number];
    if (!progress.header_checked) check_header(number);
    if (verify_) {
      progress.actual_crc = combined_crc(number);
      progress.damaged = progress.actual_crc != index_.records()[plan_->slots[number].index].crc;
    }
    progress.done.store(true, std::memory_order_release);
  }
  std::uint32_t combined_crc(std::size_t number) const {
    const Slot& slot = plan_->slots[number];
    const std::size_t first = plan_->chunk_at(slot.payload);
    const std::size_t last = plan_->chunk_at(slot.end - 1);
    if (first == last) return progress_[number].actual_crc;
    std::uint32_t crc = cut_crcs_[first].leaving;
    for (std::size_t c = first + 1; c <= last; ++c) {
      const Chunk& chunk = plan_->chunks[c];
      const std::size_t end = std::min(chunk.end, slot.end);
      crc = crc32_combine(crc, cut_crcs_[c].entering, end - chunk.begin);
    }
    return crc;
  }

  bool header_agrees(const Slot& slot) const {
    const IndexedRecord& record = index_.records()[slot.index];
    try {
      const std::uint64_t promised = record.header_offset + (slot.payload - slot.header);
      return payload_offset(placement_->header(slot), record, index_.root().size(),
                            promised + record.nbytes) == promised;
    } catch (const FormatError&) {
      return false;  // the second read, with exact offsets, throws the error
    }
  }

  DamagedRecord damage(std::size_t number) const {
    const Slot& slot = plan_->slots[number];
    const IndexedRecord& record = index_.records()[slot.index];
    return {record.name, record.header_offset + (slot.payload - slot.header), record.crc,
            progress_[number].actual_crc};
  }

  const ByteSource& source_;
  const ArchiveIndex& index_;
  const std::shared_ptr<const TransferPlan> plan_;
  const std::shared_ptr<Placement> placement_;
  const bool verify_;
  const std::size_t n_threads_;
  ReadSlots read_slots_;
  std::vector<Progress> progress_;  // by slot
  std::vector<CutCrcs> cut_crcs_;   // by chunk
  std::mutex buffers_mutex_;
  std::unique_ptr<BufferPool> buffers_;
  std::atomic<std::uint64_t> nbytes_read_{0};
  std::unique_ptr<ChunkPipeline> pipeline_;  // last: its workers use everything above
};

}  // namespace ptsave
