// Copies of storages, as they were at one moment.
//
// Neighbouring storages share blocks of 32 MiB, a larger one has its own.  Every storage is really
// copied, in pieces of 4 MiB by all threads, with stores past the cache.
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/memory/staging_pool.h"
#include "core/pipeline/pipeline.h"
#include "storage/storage.h"

namespace ptsave {

// Two steps, so that where everything will be is known before the first byte is copied.
class Snapshot {
 public:
  // Reserves the memory of the copies.  A storage on an accelerator stands for its own copy, which
  // is the business of whoever writes it: a Stager's.  Empty storages, and those on the CPU without
  // memory (holes of the file), get storages like them; so do all others if only their sizes are to
  // be written.
  explicit Snapshot(const StorageList& sources, bool without_bytes = false,
                    StagingPool& pool = StagingPool::instance());

  // Copy i is that of source i.
  const StorageList& storages() const { return copies_; }
  // Copies the sources in CPU memory.  Those on devices that are out of reach are the caller's to
  // copy.
  void copy(std::size_t n_threads, const Poll& poll);
  std::uint64_t nbytes_copied() const { return nbytes_copied_.load(std::memory_order_relaxed); }
  // Lets go of the sources.
  void release_sources() { pieces_.clear(); }
  // ... and of the copies.
  void release();
  // In a forked child, instead of release(): the memory stays for ever.  Memory of accelerators
  // must not be touched there, not even to free it, because that asks the parent's driver.
  void abandon();

 private:
  // A source, and its beginning in the sequence of all copied bytes.
  struct Piece {
    c10::Storage source;
    std::byte* target = nullptr;
    std::uint64_t begin = 0;
  };

  void add_group(const StorageList& sources, const std::vector<std::size_t>& group,
                 const StagingBlock& block);
  void copy_range(std::uint64_t begin, std::uint64_t end) const;

  StorageList copies_;
  std::vector<Piece> pieces_;
  std::uint64_t nbytes_to_copy_ = 0;
  std::atomic<std::uint64_t> nbytes_copied_{0};
};

}  // namespace ptsave
