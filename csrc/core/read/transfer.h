// One load in progress: workers read an archive chunk by chunk into a Placement, and check each
// piece while its bytes are in the cache.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/pipeline.h"
#include "core/read/placement.h"

namespace ptsave {

// A record whose bytes do not match its CRC.
struct DamagedRecord {
  std::string name;
  std::uint64_t payload_offset = 0;
  std::uint32_t expected_crc = 0;
  std::uint32_t actual_crc = 0;
};

// The central directory and a local header disagree about a payload's place.  Reading again with
// exact_offsets resolves it.
class LayoutMismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Transfer {
 public:
  // Starts reading at once; compares CRCs if `verify`.  `source` and `index` must outlive it.
  Transfer(const ByteSource& source, const ArchiveIndex& index,
           std::shared_ptr<const TransferPlan> plan, std::shared_ptr<Placement> placement,
           std::size_t n_threads, bool verify);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void wait(std::size_t index, const Poll& poll);
  std::vector<DamagedRecord> wait_all(const Poll& poll);
  void cancel() { pipeline_.reset(); }
  // Records whose payloads have been put at least in part, in file order.  Call it after cancel()
  // or wait_all(), even if that threw.
  std::vector<std::size_t> begun() const;

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
  class ChunkIntake;

  void read_chunk(std::size_t number);
  void read_cached(const Chunk& chunk, ChunkIntake& intake);
  void read_direct(const Chunk& chunk, ChunkIntake& intake);
  void read_buffered(const Chunk& chunk, ChunkIntake& intake);
  template <class Read>
  void read_pieces(ChunkIntake& intake, const Read& read);
  BufferPool& buffers();
  void check_header(std::size_t number);
  void finish_slot(std::size_t number);
  std::uint32_t combined_crc(std::size_t number) const;
  bool header_agrees(const Slot& slot) const;
  DamagedRecord damage(std::size_t number) const;

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
