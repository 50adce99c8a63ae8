#include "storage/snapshot.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/base/keep_for_ever.h"
#include "core/memory/buffer.h"
#include "core/memory/stream_copy.h"
#include "device/side_streams.h"

namespace ptsave {
namespace {

// Neighbours share a block until it has this size: few large blocks, but no need for the pool to
// have one piece of memory for all.
constexpr std::size_t kBlockNbytes = std::size_t{32} << 20;

bool needs_copy(const c10::Storage& storage) {
  return storage.nbytes() > 0 && (!storage.device().is_cpu() || storage.data() != nullptr) &&
         !SideStreams::are_supported(storage.device());
}

// Indices of storages that share a block, and its size.
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

Snapshot::Snapshot(const StorageList& sources, bool without_bytes, StagingPool& pool) {
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
      pieces_.push_back({source, block.data + at, nbytes_to_copy_});
      nbytes_to_copy_ += nbytes;
    }
    at += nbytes;
  }
}

void Snapshot::copy(std::size_t n_threads, const Poll& poll) {
  const std::size_t n_chunks = (nbytes_to_copy_ + kStreamPieceNbytes - 1) / kStreamPieceNbytes;
  ChunkPipeline pipeline(
      n_chunks, n_chunks > 1 ? n_threads : 0, [this](ChunkPipeline& /*self*/, std::size_t chunk) {
        const std::uint64_t begin = chunk * kStreamPieceNbytes;
        const std::uint64_t end = std::min(begin + kStreamPieceNbytes, nbytes_to_copy_);
        copy_range(begin, end);
        nbytes_copied_.fetch_add(end - begin, std::memory_order_relaxed);
      });
  pipeline.finish(poll);
}

void Snapshot::copy_range(std::uint64_t begin, std::uint64_t end) const {
  auto piece = std::prev(std::ranges::upper_bound(pieces_, begin, {}, &Piece::begin));
  while (begin < end) {
    const auto next = std::next(piece);
    const std::uint64_t piece_end = next == pieces_.end() ? nbytes_to_copy_ : next->begin;
    if (piece->source.nbytes() != piece_end - piece->begin) {
      throw std::runtime_error("a storage was resized before its bytes had been copied");
    }
    const std::uint64_t done = begin - piece->begin;
    const std::uint64_t nbytes = std::min(end, piece_end) - begin;
    const auto* const source = static_cast<const std::byte*>(piece->source.data());
    stream_copy(piece->target + done, source + done, nbytes);
    begin += nbytes;
    piece = next;
  }
}

void Snapshot::release() {
  release_sources();
  copies_.storages.clear();
}

void Snapshot::abandon() {
  keep_for_ever(std::exchange(pieces_, {}));
  keep_for_ever(std::exchange(copies_, {}));
}

}  // namespace ptsave
