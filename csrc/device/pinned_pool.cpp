#include "device/pinned_pool.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "device/side_streams.h"

namespace ptsave {
namespace {

// A device whose driver has locked memory, and the process that asked for it.
struct Use {
  c10::Device device;
  pid_t process;
};

class LastUse {
 public:
  void note(c10::Device device) {
    const std::lock_guard lock(mutex_);
    use_ = Use{device, ::getpid()};
  }
  std::optional<c10::Device> device() {
    const std::lock_guard lock(mutex_);
    return use_ && use_->process == ::getpid() ? std::optional(use_->device) : std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::optional<Use> use_;
};

LastUse& last_use() {
  static auto& instance = *new LastUse;
  return instance;
}

}  // namespace

void release_pinned_memory() {
  const std::optional<c10::Device> device = last_use().device();
  if (!device) return;
  const c10::DeviceGuard guard(*device);  // it has a context
  SideStreams::wait_for_idle_streams();   // else the allocator believes they use freed memory
  at::getHostAllocator(device->type())->empty_cache();
}

c10::Storage pinned_storage(c10::Device device, std::size_t nbytes) {
  last_use().note(device);
  at::HostAllocator* const allocator = at::getHostAllocator(device.type());
  return {c10::Storage::use_byte_size_t(), nbytes, allocator->allocate(nbytes), allocator,
          /*resizable=*/false};
}

PinnedPool::PinnedPool(c10::Device device, std::size_t nbytes, std::size_t max_count)
    : device_(device), nbytes_(nbytes), max_count_(max_count) {}

PinnedPool::Buffer::Buffer(std::shared_ptr<PinnedPool> pool, c10::Storage storage)
    : pool_(std::move(pool)), storage_(std::move(storage)) {}

PinnedPool::Buffer::~Buffer() {
  if (storage_ && pool_) pool_->release(std::move(storage_));
}

std::unique_ptr<PinnedPool::Buffer> PinnedPool::try_acquire() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      auto buffer = std::make_unique<Buffer>(shared_from_this(), std::move(free_.back()));
      free_.pop_back();
      return buffer;
    }
    if (count_ == max_count_) return nullptr;
    free_.reserve(count_ + 1);  // release() must not throw
    ++count_;
  }
  try {
    return std::make_unique<Buffer>(shared_from_this(), pinned_storage(device_, nbytes_));
  } catch (...) {
    const std::lock_guard lock(mutex_);
    --count_;
    released_.notify_one();
    throw;
  }
}

PinnedPool::Buffer PinnedPool::acquire() {
  for (;;) {
    if (std::unique_ptr<Buffer> buffer = try_acquire()) return std::move(*buffer);
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return !free_.empty() || count_ < max_count_; });
  }
}

void PinnedPool::release(c10::Storage storage) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(storage));
  released_.notify_one();
}

}  // namespace ptsave
