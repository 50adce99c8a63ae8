// Memory for copies of storages that wait to be written.
//
// The pool keeps returned blocks, because fresh pages cost more than the copy into them.  Free
// memory is one heap of extents, so a save can use the memory of an earlier one, whatever the sizes
// of its storages are.  If free memory does not suffice, it first goes back to the system, and new
// memory is mapped.  So the pool never holds more memory than was in use at one time.
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
  const Mapping* mapping = nullptr;  // holds the block, and lives as long as the block
  bool is_new = false;               // mapped for this block: its pages are not there yet
};

// Alignment of a storage in a shared block.  Small storages have less than in torch's allocator.
constexpr std::size_t staging_alignment(std::size_t nbytes) { return nbytes < 64 ? 8 : 64; }

// Safe for concurrent use; must outlive its blocks.
class StagingPool {
 public:
  struct Statistics {
    std::size_t mapped_nbytes = 0;  // address space
    std::size_t used_nbytes = 0;    // the part in use by blocks
    std::uint64_t n_mappings = 0;   // so far
  };

  // The process's pool, which survives static destruction.  A forked child begins with an empty
  // pool: it does not have the parent's memory, and must not touch the blocks that it has
  // inherited.  (If the child had that memory, each page that the parent fills later would be
  // copied.)
  static StagingPool& instance();

  // Takes page-aligned blocks of at least these sizes, which must not be 0.  If memory is short,
  // takes no block and throws std::bad_alloc.
  std::vector<StagingBlock> acquire(const std::vector<std::size_t>& sizes);
  // Returns the free memory to the system.
  void trim();
  Statistics statistics() const;

  // A part of the memory that was free when it was listed.
  struct FreePiece {
    std::shared_ptr<const Mapping> mapping;
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  // All free memory, in pieces of a huge page.
  std::vector<FreePiece> free_pieces() const;
  // Makes a piece present for a later block, unless a block has taken it.
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
  std::uint64_t generation_ = 0;  // forks so far: older blocks are the parent's
};

}  // namespace ptsave
