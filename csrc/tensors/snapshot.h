// The storages that a save writes: as they are, or copies of them as they were at one moment.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/memory/staging_pool.h"
#include "core/pipeline/pipeline.h"
#include "core/write/file_plan.h"
#include "core/write/staging_copy.h"
#include "device/accelerator_copies.h"
#include "tensors/storage.h"

namespace ptsave {

// Adds the records data/0, data/1, ..., which keep their storages alive.  Adds storages on
// accelerators also to `on_accelerators`, by record.
void add_storages(const StorageList& list, PlannedRecords& records,
                  AcceleratorStager::Sources& on_accelerators);

// Copies of storages as they were at one moment.
//
// Neighbouring storages share blocks of 32 MiB; larger ones have their own.  All threads copy, in
// pieces of 2 MiB with stores past the cache, the bytes that no plan writes meanwhile
// (StagingCopy).
//
// Works in two steps, so that all places are known before the first byte is copied.
class Snapshot {
 public:
  // Reserves memory for the copies.  An accelerator's storage stands for its own copy, which a
  // Stager makes.  Empty storages, and CPU storages without memory (holes of the file), get
  // storages like themselves.  Without bytes, when only sizes will be written, all storages do.
  explicit Snapshot(const StorageList& sources, bool without_bytes = false,
                    StagingPool& pool = StagingPool::instance());

  // Storage i is the copy of source i.
  const StorageList& storages() const { return copies_; }
  // Copies the sources in CPU memory; the caller copies sources on devices that SideStreams does
  // not support.  Calls `when_slow` if copying is slow; from then on, a plan may follow payloads().
  void copy(std::size_t n_threads, const Poll& poll, const StagingCopy::WhenSlow& when_slow);
  std::uint64_t nbytes_copied() const { return copying_->nbytes_copied(); }
  // The copies while they are being made.
  StagingCopy& payloads() { return *copying_; }
  // Releases the sources.
  void release_sources() { sources_.clear(); }
  // Releases the sources and the copies.
  void release();
  // Replaces release() in a forked child, and leaks the memory.  Freeing memory of accelerators
  // would call the parent's driver.
  void abandon();

 private:
  // A storage to copy, and its size when the copy was planned.
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
