// One load in progress: a region of memory that mirrors the wanted part of an archive, the chunks
// that fill it, and the checks that follow each chunk while its bytes are in the cache.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/pipeline.h"
#include "core/reader.h"

namespace ptsave {

// A record to be read: its number in the index and where its payload begins in the archive.
struct WantedRecord {
  std::size_t index;
  std::uint64_t payload_offset;
};

class Transfer {
 public:
  // Starts reading at once; `verify` says whether CRCs are compared.  `source` and `index` must
  // outlive it.
  Transfer(const ArchiveSource& source, const ArchiveIndex& index,
           std::vector<WantedRecord> records, std::size_t n_threads, bool verify);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void wait(std::size_t index, const Poll& poll);
  std::vector<DamagedRecord> wait_all(const Poll& poll);
  LoadedPayload payload(std::size_t index) const;
  void cancel() { pipeline_.reset(); }

  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }
  std::uint64_t nbytes_to_read() const { return nbytes_to_read_; }

 private:
  // A wanted record's place in the region.  `n_chunks_left` counts the chunks that hold a part of
  // it, local header included.
  struct Slot {
    std::size_t index = 0;
    std::size_t header = 0;
    std::size_t payload = 0;
    std::size_t end = 0;
    std::atomic<std::uint32_t> n_chunks_left{0};
    std::atomic<bool> done{false};
    bool damaged = false;
    std::uint32_t actual_crc = 0;
  };
  // A contiguous part of the archive and its place in the region, both page-aligned.
  struct Run {
    std::uint64_t archive_begin = 0;
    std::size_t region_begin = 0;
    std::size_t region_end = 0;
    std::size_t first_slot = 0;
  };
  // `entering` and `leaving`: CRCs of the pieces of records that the chunk's boundaries cut.
  struct Chunk {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::uint64_t archive_offset = 0;
    std::size_t first_slot = 0;
    std::size_t end_slot = 0;
    std::uint32_t entering = 0;
    std::uint32_t leaving = 0;

    std::uint64_t archive_position(std::size_t at) const { return archive_offset + (at - begin); }
  };
  class ChunkIntake;

  std::vector<Run> plan_runs(const std::vector<WantedRecord>& records);
  void plan_chunks(const std::vector<Run>& runs);
  void plan_segments();
  void read_chunk(std::size_t number);
  void fault_in(const Chunk& chunk);
  void read_cached(const Chunk& chunk, ChunkIntake& intake);
  void read_direct(const Chunk& chunk, ChunkIntake& intake);
  void read_buffered(const Chunk& chunk, ChunkIntake& intake);
  void finish_slot(Slot& slot);
  std::uint32_t combined_crc(const Slot& slot) const;
  bool header_agrees(const Slot& slot) const;
  DamagedRecord damage(const Slot& slot) const;
  const Slot& slot_of(std::size_t index) const;

  const ArchiveSource& source_;
  const ArchiveIndex& index_;
  const bool verify_;
  const std::size_t n_threads_;
  std::vector<Slot> slots_;                   // in file order
  std::vector<std::uint32_t> slot_by_index_;  // kNoSlot for records that are not wanted
  std::vector<Chunk> chunks_;
  std::shared_ptr<Mapping> region_;
  std::once_flag buffers_made_;
  std::unique_ptr<BufferPool> buffers_;
  std::atomic<std::int64_t> huge_page_loss_ns_{0};
  std::vector<std::size_t> segment_begins_;
  std::vector<OwnerReference> segments_;
  std::uint64_t nbytes_to_read_ = 0;
  std::atomic<std::uint64_t> nbytes_read_{0};
  std::unique_ptr<ChunkPipeline> pipeline_;  // last: its workers use everything above
};

}  // namespace ptsave
