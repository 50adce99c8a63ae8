// Memory for copies of storages that wait to be written.
//
// The pool keeps blocks that come back to it, because fresh pages cost more than the copy into
// them.  Free memory is one heap of extents, so a save finds the memory of an earlier one whatever
// the sizes of its storages are.  Only when it does not suffice, new memory is mapped, and free
// memory goes back to the system first: the pool never holds more than was once in use together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/owner.h"
#include "core/memory/buffer.h"

namespace ptsave {

// A part of the pool's memory.  It returns to the pool with its last owner.
struct StagingBlock {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  OwnerReference owner;
  const Mapping* mapping = nullptr;  // it is part of, and which lives as long as the block
};

// Of storages that share a block: small ones are packed more tightly than torch's allocator would.
constexpr std::size_t staging_alignment(std::size_t nbytes) { return nbytes < 64 ? 8 : 64; }

// Safe for concurrent use; must outlive its blocks.
class StagingPool {
 public:
  struct Statistics {
    std::size_t mapped_nbytes = 0;  // address space
    std::size_t used_nbytes = 0;    // of it, in blocks
    std::uint64_t n_mappings = 0;   // made so far
  };

  StagingPool() = default;
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool() = default;

  // The one of this process.  It survives static destruction.  A forked child begins with an empty
  // one: the parent's memory is not there (else every page that the parent stages into afterwards
  // would be copied first), and the blocks that the child has inherited must not be touched.
  static StagingPool& instance();

  // Page-aligned blocks of (at least) these sizes, which are not 0.  Throws std::bad_alloc, and
  // nothing is taken then.
  std::vector<StagingBlock> acquire(const std::vector<std::size_t>& sizes);
  // Gives back to the system the memory that is in no block.
  void trim();
  Statistics statistics() const;

  // A part of the memory that was in no block when it was listed.
  struct FreePiece {
    std::shared_ptr<const Mapping> mapping;
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  // All of that memory, in pieces of a huge page.
  std::vector<FreePiece> free_pieces() const;
  // Makes a piece present, for a later block, unless a block has it by now.
  void populate(const FreePiece& piece) const;

 private:
  class Block;
  using Extents = std::map<std::byte*, std::size_t>;  // sizes by address

  Extents::iterator best_fit(std::size_t nbytes);
  StagingBlock take(Extents::iterator extent, std::size_t nbytes);
  std::byte* map(std::size_t nbytes);
  void give_back(Extents::node_type extent, std::uint64_t generation) noexcept;
  bool are_neighbours(Extents::const_iterator left, Extents::const_iterator right) const;
  void trim_locked();
  void forget() noexcept;
  void survive_forks();

  mutable std::mutex mutex_;
  std::map<std::byte*, std::shared_ptr<Mapping>> mappings_;  // by address
  Extents free_;
  std::size_t used_nbytes_ = 0;
  std::uint64_t n_mappings_ = 0;
  std::uint64_t generation_ = 0;  // of the blocks: how many forks ago they were made
};

}  // namespace ptsave
