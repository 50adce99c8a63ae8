#include "core/memory/staging_pool.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <system_error>
#include <utility>

namespace ptsave {

// Keeps the map node of its extent, so that returning it allocates nothing.
class StagingPool::Block final : public Owner {
 public:
  explicit Block(StagingPool& pool) : pool_(pool), generation_(pool.generation_) {}

  void set_extent(Extents::node_type extent) { extent_ = std::move(extent); }

 private:
  ~Block() override {
    if (!extent_.empty()) pool_.give_back(std::move(extent_), generation_);
  }

  StagingPool& pool_;
  std::uint64_t generation_;
  Extents::node_type extent_;
};

StagingPool& StagingPool::instance() {
  static StagingPool& pool = *[] {
    auto* const made = new StagingPool;
    made->survive_forks();
    return made;
  }();
  return pool;
}

namespace {

// Created while the library is loaded.  If a thread created it later, a child forked at that moment
// would wait for ever: the child does not have that thread.
[[gnu::constructor]] void make_at_load() noexcept {
  try {
    StagingPool::instance();
  } catch (const std::exception&) {
    return;  // the first use tries again
  }
}

}  // namespace

std::vector<StagingBlock> StagingPool::acquire(const std::vector<std::size_t>& sizes) {
  // Declared before the lock, so that after an error blocks return to the pool without the lock.
  std::vector<StagingBlock> blocks(sizes.size());
  const std::lock_guard lock(mutex_);
  std::size_t missing = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::size_t nbytes = align_up(sizes[i], page_nbytes());
    if (const auto extent = best_fit(nbytes); extent != free_.end()) {
      blocks[i] = take(extent, nbytes);
    } else {
      missing += nbytes;
    }
  }
  if (missing == 0) return blocks;
  trim_locked();
  std::byte* at = map(missing);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (blocks[i].data != nullptr) continue;
    blocks[i] = take(free_.find(at), align_up(sizes[i], page_nbytes()));
    blocks[i].is_new = true;
    at += blocks[i].nbytes;
  }
  return blocks;
}

void StagingPool::trim() {
  const std::lock_guard lock(mutex_);
  trim_locked();
}

StagingPool::Statistics StagingPool::statistics() const {
  const std::lock_guard lock(mutex_);
  Statistics result{0, used_nbytes_, n_mappings_};
  for (const auto& [address, mapping] : mappings_) result.mapped_nbytes += mapping->nbytes();
  return result;
}

std::vector<StagingPool::FreePiece> StagingPool::free_pieces() const {
  std::vector<FreePiece> pieces;
  const std::lock_guard lock(mutex_);
  for (const auto& [data, nbytes] : free_) {
    const auto& [address, mapping] = *std::prev(mappings_.upper_bound(data));
    const auto begin = static_cast<std::size_t>(data - address);
    for (std::size_t at = begin; at < begin + nbytes;) {
      const std::size_t end = align_down(at, kHugePageNbytes) + kHugePageNbytes;
      pieces.push_back({mapping, at, std::min(end, begin + nbytes)});
      at = end;
    }
  }
  return pieces;
}

// Populates without the lock, so that other threads do not wait.  A block that is taken meanwhile
// may be populated, too.  A mapping that the pool drops meanwhile lives as long as the piece.
void StagingPool::populate(const FreePiece& piece) const {
  {
    const std::lock_guard lock(mutex_);
    const auto extent = free_.upper_bound(piece.mapping->data() + piece.begin);
    if (extent == free_.begin()) return;
    const auto& [data, nbytes] = *std::prev(extent);
    if (data + nbytes < piece.mapping->data() + piece.end) return;
  }
  piece.mapping->populate(piece.begin, piece.end);
}

StagingPool::Extents::iterator StagingPool::best_fit(std::size_t nbytes) {
  auto best = free_.end();
  for (auto extent = free_.begin(); extent != free_.end(); ++extent) {
    const bool fits = extent->second >= nbytes;
    if (fits && (best == free_.end() || extent->second < best->second)) best = extent;
  }
  return best;
}

StagingBlock StagingPool::take(Extents::iterator extent, std::size_t nbytes) {
  auto* const block = new Block(*this);
  const Mapping& mapping = *std::prev(mappings_.upper_bound(extent->first))->second;
  StagingBlock result{extent->first, nbytes, OwnerReference(block), &mapping, false};
  if (extent->second > nbytes) free_.emplace(extent->first + nbytes, extent->second - nbytes);
  auto node = free_.extract(extent);
  node.mapped() = nbytes;
  block->set_extent(std::move(node));
  used_nbytes_ += nbytes;
  return result;
}

std::byte* StagingPool::map(std::size_t nbytes) {
  auto mapping = std::make_shared<Mapping>(nbytes);
  mapping->exclude_from_children();
  std::byte* const data = mapping->data();
  const auto extent = free_.emplace(data, mapping->nbytes()).first;
  try {
    mappings_.emplace(data, std::move(mapping));
  } catch (...) {
    free_.erase(extent);
    throw;
  }
  ++n_mappings_;
  return data;
}

void StagingPool::give_back(Extents::node_type extent, std::uint64_t generation) noexcept {
  const std::lock_guard lock(mutex_);
  if (generation != generation_) return;  // the parent's: not this process's memory
  used_nbytes_ -= extent.mapped();
  auto place = free_.insert(std::move(extent)).position;
  if (const auto next = std::next(place); next != free_.end() && are_neighbours(place, next)) {
    place->second += next->second;
    free_.erase(next);
  }
  if (place == free_.begin()) return;
  if (const auto previous = std::prev(place); are_neighbours(previous, place)) {
    previous->second += place->second;
    free_.erase(place);
  }
}

// Extents of different mappings are never joined, even if the mappings are adjacent.
bool StagingPool::are_neighbours(Extents::const_iterator left,
                                 Extents::const_iterator right) const {
  return left->first + left->second == right->first && !mappings_.contains(right->first);
}

void StagingPool::trim_locked() {
  for (auto extent = free_.begin(); extent != free_.end();) {
    const auto mapping = std::prev(mappings_.upper_bound(extent->first));
    const auto [data, nbytes] = *extent;
    if (data == mapping->first && nbytes == mapping->second->nbytes()) {
      mappings_.erase(mapping);
      extent = free_.erase(extent);
    } else {
      const auto begin = static_cast<std::size_t>(data - mapping->first);
      mapping->second->discard(begin, begin + nbytes);
      ++extent;
    }
  }
}

// Runs in a forked child, which does not have the mappings' memory.
void StagingPool::forget() noexcept {
  for (auto& [address, mapping] : mappings_) mapping->abandon();
  mappings_.clear();
  free_.clear();
  used_nbytes_ = 0;
  n_mappings_ = 0;
  ++generation_;
}

void StagingPool::survive_forks() {
  const auto lock = [] { instance().mutex_.lock(); };
  const auto unlock = [] { instance().mutex_.unlock(); };
  const auto begin_child = [] {
    instance().forget();
    instance().mutex_.unlock();
  };
  if (::pthread_atfork(lock, unlock, begin_child) != 0) {
    throw std::system_error(ENOMEM, std::generic_category(), "pthread_atfork");
  }
}

}  // namespace ptsave
