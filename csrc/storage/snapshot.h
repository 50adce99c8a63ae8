// Copies of storages, as they were at one moment.
//
// Neighbouring storages share blocks of 32 MiB, a larger one has its own.  A storage is really
// copied, in pieces of 2 MiB by all threads, with stores past the cache, unless a plan writes it
// meanwhile (StagingCopy).
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/memory/staging_pool.h"
#include "core/pipeline/pipeline.h"
#include "core/write/staging_copy.h"
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
  // copy.  Calls `when_slow` if that takes long: a plan may follow payloads() from then on.
  void copy(std::size_t n_threads, const Poll& poll, const StagingCopy::WhenSlow& when_slow);
  std::uint64_t nbytes_copied() const { return copying_->nbytes_copied(); }
  // The copies while they are being made.
  StagingCopy& payloads() { return *copying_; }
  // Lets go of the sources.
  void release_sources() { sources_.clear(); }
  // ... and of the copies.
  void release();
  // In a forked child, instead of release(): the memory stays for ever.  Memory of accelerators
  // must not be touched there, not even to free it, because that asks the parent's driver.
  void abandon();

 private:
  // A storage that is copied, and its size when the copy was planned.
  struct Source {
    c10::Storage storage;
    std::size_t nbytes = 0;
  };

  void add_group(const StorageList& sources, const std::vector<std::size_t>& group,
                 const StagingBlock& block);
  const std::byte* source(std::size_t i) const;

  StorageList copies_;
  std::vector<Source> sources_;
  std::unique_ptr<StagingCopy> copying_;
};

}  // namespace ptsave
