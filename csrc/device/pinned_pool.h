// Page-locked host memory, which accelerators read and write by themselves.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ptsave {

// Memory from the host allocator of a device's type.  Throws c10::Error if memory cannot be locked.
c10::Storage pinned_storage(c10::Device device, std::size_t nbytes);

// Returns the host allocator's free memory to the system, if pinned_storage() has been called.
// Does nothing in a forked child: the memory is the parent's.
void release_pinned_memory();

// A bounded number of equal buffers, allocated when first needed.  The host allocator keeps freed
// memory, so only a process's first save or load waits for locking.  Safe for concurrent use.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  // `nbytes` should be a power of two, because torch's allocators round up to one.
  PinnedPool(c10::Device device, std::size_t nbytes, std::size_t max_count);

  // A buffer that returns to its pool, if it has one.
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
  // Waits for a free buffer.  Throws c10::Error if memory cannot be locked.
  Buffer acquire();
  // Returns null if all buffers are in use.
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
