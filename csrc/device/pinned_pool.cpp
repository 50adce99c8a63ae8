#include "device/pinned_pool.h"

#include <ATen/core/CachingHostAllocator.h>

#include <utility>

namespace ptsave {

c10::Storage pinned_storage(c10::DeviceType device_type, std::size_t nbytes) {
  at::HostAllocator* const allocator = at::getHostAllocator(device_type);
  return {c10::Storage::use_byte_size_t(), nbytes, allocator->allocate(nbytes), allocator,
          /*resizable=*/false};
}

PinnedPool::PinnedPool(c10::DeviceType device_type, std::size_t nbytes, std::size_t max_count)
    : device_type_(device_type), nbytes_(nbytes), max_count_(max_count) {}

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
    return std::make_unique<Buffer>(shared_from_this(), pinned_storage(device_type_, nbytes_));
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
