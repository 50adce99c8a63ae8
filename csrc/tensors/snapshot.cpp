#include "tensors/snapshot.h"

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/base/owner.h"
#include "core/memory/buffer.h"
#include "device/side_streams.h"

namespace ptsave {

void add_storages(const StorageList& list, PlannedRecords& records,
                  AcceleratorStager::Sources& on_accelerators) {
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
      on_accelerators.emplace(first + i, AcceleratorStager::Source{storage, 0, storage.nbytes()});
    }
  }
  records.keep(std::move(in_memory));
}

namespace {

// Neighbours share a block until it has this size.  So blocks are few, but the pool does not need
// one piece of memory for all.
constexpr std::size_t kBlockNbytes = std::size_t{32} << 20;

bool needs_copy(const c10::Storage& storage) {
  return storage.nbytes() > 0 && (!storage.device().is_cpu() || storage.data() != nullptr) &&
         !SideStreams::are_supported(storage.device());
}

// The indices of storages that share a block, and the block's size.
struct Group {
  std::vector<std::size_t> indices;
  std::size_t nbytes = 0;
};

std::vector<Group> group_neighbours(const std::vector<c10::Storage>& storages) {
  std::vector<Group> groups;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    if (!needs_copy(storages[i])) continue;
    if (groups.empty() || groups.back().nbytes >= kBlockNbytes) groups.emplace_back();
    Group& group = groups.back();
    const std::size_t nbytes = storages[i].nbytes();
    group.indices.push_back(i);
    group.nbytes = align_up(group.nbytes, staging_alignment(nbytes)) + nbytes;
  }
  return groups;
}

}  // namespace

Snapshot::Snapshot(const StorageList& sources, bool without_bytes, StagingPool& pool)
    : copying_(std::make_unique<StagingCopy>([this](std::size_t i) { return source(i); })) {
  std::vector<Group> groups;
  if (!without_bytes) groups = group_neighbours(sources.storages);
  std::vector<std::size_t> sizes;
  sizes.reserve(groups.size());
  for (const Group& group : groups) sizes.push_back(group.nbytes);
  const std::vector<StagingBlock> blocks = pool.acquire(sizes);
  copies_.storages.resize(sources.storages.size());
  for (std::size_t i = 0; i < groups.size(); ++i) add_group(sources, groups[i].indices, blocks[i]);
  for (std::size_t i = 0; i < copies_.storages.size(); ++i) {
    const c10::Storage& source = sources.storages[i];
    c10::Storage& copy = copies_.storages[i];
    if (copy) continue;
    const bool is_staged = !without_bytes && SideStreams::are_supported(source.device());
    copy = is_staged ? source : storage_over({nullptr, source.nbytes(), {}});
  }
}

void Snapshot::add_group(const StorageList& sources, const std::vector<std::size_t>& group,
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

const std::byte* Snapshot::source(std::size_t i) const {
  const auto& [storage, nbytes] = sources_.at(i);
  if (storage.nbytes() != nbytes) {
    throw std::runtime_error("a storage was resized before its bytes had been copied");
  }
  return static_cast<const std::byte*>(storage.data());
}

void Snapshot::copy(std::size_t n_threads, const Poll& poll,
                    const StagingCopy::WhenSlow& when_slow) {
  copying_->run(n_threads, poll, when_slow);
}

void Snapshot::release() {
  release_sources();
  copies_.storages.clear();
}

void Snapshot::abandon() {
  keep_for_ever(std::exchange(sources_, {}));
  keep_for_ever(std::move(copying_));  // threads of the parent may wait in it
  keep_for_ever(std::exchange(copies_, {}));
}

}  // namespace ptsave
