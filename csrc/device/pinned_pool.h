// Page-locked host memory, which accelerators copy from and to by themselves.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ptsave {

// Memory of the host allocator of a device's type.  c10::Error where memory cannot be locked.
c10::Storage pinned_storage(c10::Device device, std::size_t nbytes);

// Gives the memory back to the system that this allocator keeps, nobody uses, and later copies
// would take again, if there has been a call of pinned_storage().  In a forked child it does
// nothing: the memory is the parent's.
void release_pinned_memory();

// A bounded number of equal buffers, made when they are first needed.  torch's own host allocator
// keeps freed memory, so only the first save or load of a process waits for memory to be locked.
// Safe for concurrent use.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  // Buffers hold `nbytes`, which should be a power of two: torch's allocators round up to one.
  PinnedPool(c10::Device device, std::size_t nbytes, std::size_t max_count);

  // A buffer, which goes back to its pool, if it has one.
  class Buffer {
   public:
    explicit Buffer(std::shared_ptr<PinnedPool> pool, c10::Storage storage);
    Buffer(Buffer&& other) noexcept = default;
    Buffer& operator=(Buffer&& other) = delete;
    ~Buffer();

    const c10::Storage& storage() const { return storage_; }
    std::byte* data() const { return static_cast<std::byte*>(storage_.mutable_data()); }

   private:
    std::shared_ptr<PinnedPool> pool_;
    c10::Storage storage_;
  };

  std::size_t buffer_nbytes() const { return nbytes_; }
  // Waits until there is one.  c10::Error where memory cannot be locked.
  Buffer acquire();
  // Nothing if all are in use.
  std::unique_ptr<Buffer> try_acquire();

 private:
  void release(c10::Storage storage);

  const c10::Device device_;
  const std::size_t nbytes_;
  const std::size_t max_count_;
  std::mutex mutex_;
  std::condition_variable released_;
  std::size_t count_ = 0;
  std::vector<c10::Storage> free_;
};

}  // namespace ptsave
