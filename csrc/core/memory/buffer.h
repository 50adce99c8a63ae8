// Page-aligned memory that asks for huge pages where they cost less than small ones, and a bounded
// pool of buffers cut from it.
//
// Fresh memory costs more than copying it: 4 KiB faults run at 1 GB/s, huge-page faults at 3.5 (if
// the memory is there: FreshPages).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "core/memory/fresh_pages.h"
#include "core/memory/pages.h"

namespace ptsave {

// That of systems with pages of 4 KiB; a whole number of pages on all others, where huge pages are
// larger than most tensors.
inline constexpr std::size_t kHugePageNbytes = std::size_t{2} << 20;

// The part of a mapping that will be used.  The system refuses a mapping that is larger than all of
// its memory and has to be usable as a whole (kAll).
enum class Use : std::uint8_t { kAll, kParts };

// An anonymous private mapping, zero-filled, aligned to huge pages when it is large enough to hold
// one.  Owns the memory.  Throws std::bad_alloc.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(std::size_t nbytes, Use use = Use::kAll);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  // Makes the pages that hold [begin, end) present, by the kind of page that FreshPages chooses.
  // Pieces of a huge page count as present if their first and last pages are.
  // Does nothing on kernels without MADV_POPULATE_WRITE: the pages come when they are touched.
  void populate(std::size_t begin, std::size_t end) const noexcept;
  // Gives the memory of the whole pages in [begin, end) back to the system; they read as zero
  // after.
  void discard(std::size_t begin, std::size_t end) const noexcept;
  // Forked children will not have this memory, and so this process never has to copy it.
  void exclude_from_children() const noexcept;
  // Leaves the memory to itself, as in a child that does not have it.
  void abandon() noexcept;

 private:
  void populate_piece(std::size_t begin, std::size_t end) const noexcept;
  void prefer(PageKind kind) const noexcept;
  void advise(PageKind kind, std::size_t begin, std::size_t end) const noexcept;

  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  // Of the pages that are not present yet; nothing while a thread changes it.
  mutable std::atomic<std::optional<PageKind>> kind_{PageKind::kSmall};
};

// Whether a pool may have fewer buffers, but at least one, where there is no memory for more.
enum class Count : std::uint8_t { kExact, kUpTo };

// A fixed number of equal buffers: the memory budget of a pipeline.  Waiting for a lease is the
// back-pressure.  Safe for concurrent use; must outlive its leases.
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

}  // namespace ptsave
