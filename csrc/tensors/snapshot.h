// The storages that a save writes: the originals, or copies of their contents at one moment.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/base/owner.h"
#include "core/memory/buffer.h"
#include "core/memory/staging_pool.h"
#include "core/pipeline/pipeline.h"
#include "core/write/file_plan.h"
#include "core/write/staging_copy.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/storage.h"

namespace ptsave {

// Adds the records data/0, data/1, ..., which keep their storages alive.  Adds storages on
// accelerators also to `on_accelerators`, by record.
inline void add_storages(const StorageList& list, PlannedRecords& records,
                         AcceleratorSources& on_accelerators) {
  const std::size_t first = records.size();
  constexpr std::size_t kOthers = 16;  // usually fewer records follow the storages
  records.reserve(first + list.storages.size() + kOthers);
  auto in_memory = std::make_shared<std::vector<c10::Storage>>();
  in_memory->reserve(list.storages.size());
  for (std::size_t i = 0; i < list.storages.size(); ++i) {
    const c10::Storage& storage = list.storages[i];
    std::string name = "data/" + std::to_string(i);
    if (storage.device().is_cpu()) {
      records.add(std::move(name), storage.nbytes(), static_cast<const std::byte*>(storage.data()));
      in_memory->push_back(storage);
    } else {
      records.add_staged(std::move(name), storage.nbytes());
      if (storage.nbytes() == 0) continue;
      on_accelerators.emplace(first + i, AcceleratorSource{storage, 0, storage.nbytes()});
    }
  }
  records.keep(std::move(in_memory));
}

// Neighbours share a block until it has this size.  So blocks are few, but the pool does not need
// one piece of memory for all.
inline constexpr std::size_t kSharedBlockNbytes = std::size_t{32} << 20;

inline bool needs_copy(const c10::Storage& storage) {
  return storage.nbytes() > 0 && (!storage.device().is_cpu() || storage.data() != nullptr) &&
         !SideStreams::are_supported(storage.device());
}

// The indices of storages that share a block, and the block's size.
struct Group {
  std::vector<std::size_t> indices;
  std::size_t nbytes = 0;
};

inline std::vector<Group> group_neighbours(const std::vector<c10::Storage>& storages) {
  std::vector<Group> groups;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    if (!needs_copy(storages[i])) continue;
    if (groups.empty() || groups.back().nbytes >= kSharedBlockNbytes) groups.emplace_back();
    Group& group = groups.back();
    const std::size_t nbytes = storages[i].nbytes();
    group.indices.push_back(i);
    group.nbytes = align_up(group.nbytes, staging_alignment(nbytes)) + nbytes;
  }
  return groups;
}

// Copies of the contents of storages at one moment.
//
// Neighbouring storages share blocks of 32 MiB; larger ones have their own.  All threads copy the
// bytes that no plan writes meanwhile (StagingCopy), in pieces of 2 MiB with stores past the cache.
//
// Works in two steps, so that all places are known before the first byte is copied.
class Snapshot {
 public:
  // Reserves memory for the copies.  An accelerator's storage stands for its own copy, which a
  // Stager makes.  Empty storages, and CPU storages without memory (holes of the file), get
  // storages without memory of the same size.  With `without_bytes`, for saves that write only
  // sizes, all storages get such storages.
  Snapshot(const StorageList& sources, bool without_bytes)
      : copying_(std::make_unique<StagingCopy>([this](std::size_t i) { return source(i); })) {
    std::vector<Group> groups;
    if (!without_bytes) groups = group_neighbours(sources.storages);
    std::vector<std::size_t> sizes;
    sizes.reserve(groups.size());
    for (const Group& group : groups) sizes.push_back(group.nbytes);
    const std::vector<StagingBlock> blocks = StagingPool::instance().acquire(sizes);
    copies_.storages.resize(sources.storages.size());
    for (std::size_t i = 0; i < groups.size(); ++i)
      add_group(sources, groups[i].indices, blocks[i]);
    for (std::size_t i = 0; i < copies_.storages.size(); ++i) {
      const c10::Storage& source = sources.storages[i];
      c10::Storage& copy = copies_.storages[i];
      if (copy) continue;
      const bool is_staged = !without_bytes && SideStreams::are_supported(source.device());
      copy = is_staged ? source : storage_over({nullptr, source.nbytes(), {}});
    }
  }

  // Storage i is the copy of source i.
  const StorageList& storages() const { return copies_; }
  // Copies the sources in CPU memory; the caller copies sources on devices that SideStreams does
  // not support.  Calls `when_slow` if copying is slow; from then on, a plan may follow payloads().
  void copy(std::size_t n_threads, const Poll& poll, const StagingCopy::WhenSlow& when_slow) {
    copying_->run(n_threads, poll, when_slow);
  }
  std::uint64_t nbytes_copied() const { return copying_->nbytes_copied(); }
  // The copies while they are being made.
  StagingCopy& payloads() { return *copying_; }
  void release_sources() { sources_.clear(); }
  void release() {
    release_sources();
    copies_.storages.clear();
  }
  // A forked child calls this instead of release().  Leaks the memory, because freeing memory of
  // accelerators would call the parent's driver.
  void abandon() {
    keep_for_ever(std::exchange(sources_, {}));
    keep_for_ever(std::move(copying_));  // threads of the parent may wait in it
    keep_for_ever(std::exchange(copies_, {}));
  }

 private:
  // A storage to copy, and its size when the copy was planned.
  struct Source {
    c10::Storage storage;
    std::size_t nbytes = 0;
  };

  void add_group(const StorageList& sources, const std::vector<std::size_t>& group,
                 const StagingBlock& block) {
    std::size_t at = 0;
    for (const std::size_t i : group) {
      const c10::Storage& source = sources.storages[i];
      const std::size_t nbytes = source.nbytes();
      at = align_up(at, staging_alignment(nbytes));
      copies_.storages[i] = storage_over({block.data + at, nbytes, block.owner});
      if (source.device().is_cpu()) {
        sources_.push_back({source, nbytes});
        copying_->add(block.data + at, nbytes, *block.mapping);
      }
      at += nbytes;
    }
  }

  const std::byte* source(std::size_t i) const {
    const auto& [storage, nbytes] = sources_.at(i);
    if (storage.nbytes() != nbytes) {
      throw std::runtime_error("a storage was resized before its bytes had been copied");
    }
    return static_cast<const std::byte*>(storage.data());
  }

  StorageList copies_;
  std::vector<Source> sources_;
  std::unique_ptr<StagingCopy> copying_;
};

}  // namespace ptsave
