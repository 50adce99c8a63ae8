// Page-aligned memory, a bounded pool of buffers, and copies past the cache.  Memory has huge pages
// if they cost less.
//
// Fresh memory costs more than copying it: 4 KiB faults run at 1 GB/s, huge-page faults at 3.5 GB/s
// (unless the host has taken the memory back: FreshPages).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "core/memory/pages.h"

namespace ptsave {

// The size of a huge page on systems with pages of 4 KiB.  On other systems it is a whole number of
// pages, and their huge pages are larger than most tensors.
inline constexpr std::size_t kHugePageNbytes = std::size_t{2} << 20;

// How much of a mapping will be used.  The system refuses kAll mappings larger than its memory.
enum class Use : std::uint8_t { kAll, kParts };

// Owns an anonymous private mapping, zero-filled, aligned to huge pages if it is large enough for
// one.  Throws std::bad_alloc.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(std::size_t nbytes, Use use = Use::kAll);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  // Makes the pages that hold [begin, end) present.  FreshPages chooses their kind.  A huge page
  // counts as present if its first and last small pages are.  Does nothing on kernels without
  // MADV_POPULATE_WRITE: the pages then become present when they are first accessed.
  void populate(std::size_t begin, std::size_t end) const noexcept;
  // Returns the whole pages in [begin, end) to the system; they read as zero afterwards.
  void discard(std::size_t begin, std::size_t end) const noexcept;
  // Removes this memory from forked children, so that this process never has to copy it.
  void exclude_from_children() const noexcept;
  // Forgets the memory without unmapping it.  For a forked child, which does not have the memory.
  void abandon() noexcept;

 private:
  void populate_piece(std::size_t begin, std::size_t end) const noexcept;
  void prefer(PageKind kind) const noexcept;
  void advise(PageKind kind, std::size_t begin, std::size_t end) const noexcept;

  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  // The kind of page for memory that is not present yet; empty while a thread changes the kind.
  mutable std::atomic<std::optional<PageKind>> kind_{PageKind::kSmall};
};

// Whether a pool may have fewer buffers (at least one) if memory is short.
enum class Count : std::uint8_t { kExact, kUpTo };

// A fixed number of equal buffers: the memory budget of a pipeline, whose threads wait for a lease.
// Safe for concurrent use; must outlive its leases.
class BufferPool {
 public:
  BufferPool(std::size_t count, std::size_t buffer_nbytes, Count how_many = Count::kExact);

  std::size_t count() const { return count_; }

  class Lease {
   public:
    explicit Lease(BufferPool& pool) : pool_(pool), data_(pool.acquire()) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { pool_.release(data_); }

    std::byte* data() const { return data_; }

   private:
    BufferPool& pool_;
    std::byte* data_;
  };

 private:
  std::byte* acquire();
  void release(std::byte* buffer);

  Mapping memory_;
  std::size_t count_;
  std::mutex mutex_;
  std::condition_variable released_;
  std::vector<std::byte*> free_;
};

// memcpy past the cache: it does not read the target's lines before it overwrites them, which saves
// a third of the traffic.  The C library does this only above the size of a large cache.
void stream_copy(std::byte* target, const std::byte* source, std::size_t nbytes) noexcept;

}  // namespace ptsave
