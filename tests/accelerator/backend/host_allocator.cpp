// Pinned memory of the host.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "address_space.h"
#include "context.h"
#include "memory.h"
#include "stream.h"

namespace fake {
namespace {

constexpr std::size_t kPage = 4096;

struct Block {
  std::byte* address;
  std::size_t size;
  Uses uses;
};

void free_block(void* block);

class Allocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    if (size == 0) {
      return {nullptr, nullptr, &free_block, c10::Device(c10::DeviceType::CPU)};
    }
    TORCH_CHECK(!in_forked_child(), "fake: cannot use the device in a forked child");
    const std::size_t rounded = std::bit_ceil(std::max(size, kPage));
    const std::lock_guard lock(mutex_);
    release_unused();
    Block* block = take_cached(rounded);
    if (block == nullptr) {
      block = take_fresh(rounded);
    }
    // Whoever still reads or writes the block of before is to notice.
    std::memset(block->address, simulated::kPoison, block->size);
    stats_.active_requests.increase(1);
    stats_.active_bytes.increase(block->size);
    return {block->address, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  // As CUDA: freeing a block that streams have used asks the driver, which fails in a forked child;
  // and nobody catches what a destructor throws.
  void free(Block* block) {
    if (block == nullptr) {
      return;
    }
    if (in_forked_child()) {
      TORCH_CHECK(block->uses.are_none(), "fake: cannot use the device in a forked child");
      return;
    }
    const std::lock_guard lock(mutex_);
    block->uses.free();
    if (block->uses.have_ended()) {
      release(block);
    } else {
      held_back_.push_back(block);
    }
  }

  bool owns(const void* address) {
    const auto* byte = static_cast<const std::byte*>(address);
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(byte);
    return after != blocks_.begin() &&
           byte < std::prev(after)->first + std::prev(after)->second->size;
  }

  // As CUDA: a block is known by its context or by its first byte, not by a byte inside.
  bool record_event(void* ptr, void* ctx, c10::Stream stream) override {
    const std::lock_guard lock(mutex_);
    auto found = std::find_if(blocks_.begin(), blocks_.end(),
                              [ctx](const auto& entry) { return entry.second == ctx; });
    if (found == blocks_.end()) {
      found = blocks_.find(static_cast<const std::byte*>(ptr));
    }
    if (found == blocks_.end()) {
      return false;
    }
    found->second->uses.record(stream);
    return true;
  }

  void empty_cache() override {
    const std::lock_guard lock(mutex_);
    release_unused();
    if (!free_.empty()) {
      use_current_device();  // as cudaFreeHost, without a guard
    }
    for (const auto& [size, block] : std::exchange(free_, {})) {
      blocks_.erase(block->address);
      munmap(block->address, size);
      stats_.allocations.decrease(1);
      stats_.allocated_bytes.decrease(size);
      ++stats_.num_host_free;
      delete block;
    }
  }

  at::HostStats get_stats() override {
    const std::lock_guard lock(mutex_);
    release_unused();
    return stats_;
  }

  void reset_accumulated_stats() override {
    const std::lock_guard lock(mutex_);
    for (auto* stat : {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations,
                       &stats_.allocated_bytes}) {
      stat->reset_accumulated();
    }
    stats_.num_host_alloc = 0;
    stats_.num_host_free = 0;
  }

  void reset_peak_stats() override {
    const std::lock_guard lock(mutex_);
    for (auto* stat : {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations,
                       &stats_.allocated_bytes}) {
      stat->reset_peak();
    }
  }

  // Lets `after` more blocks be allocated, and refuses all others, as a full host does.
  void refuse(std::optional<std::size_t> after) {
    const std::lock_guard lock(mutex_);
    n_left_ = after;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  Block* take_cached(std::size_t size) {
    const auto found = free_.lower_bound(size);  // find() may return any of that size
    if (found == free_.end() || found->first != size) {
      return nullptr;
    }
    Block* block = found->second;
    free_.erase(found);
    return block;
  }

  Block* take_fresh(std::size_t size) {
    use_any_context();
    TORCH_CHECK_WITH(OutOfMemoryError, !n_left_ || *n_left_ > 0,
                     "fake: the host refuses to lock memory");
    if (n_left_) --*n_left_;
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, address != MAP_FAILED, "fake: cannot map ", size,
                     " bytes of pinned memory: ", std::strerror(errno));
    auto* block = new Block{static_cast<std::byte*>(address), size, {}};
    blocks_.emplace(block->address, block);
    stats_.allocations.increase(1);
    stats_.allocated_bytes.increase(size);
    ++stats_.num_host_alloc;
    return block;
  }

  // As CUDA: a block is active until the streams that use it have ended.
  void release(Block* block) {
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(block->size);
    // What was freed last is handed out first: that is where a mistake shows.
    free_.emplace_hint(free_.lower_bound(block->size), block->size, block);
  }

  void release_unused() {
    const auto unused =
        std::stable_partition(held_back_.begin(), held_back_.end(),
                              [](const Block* block) { return !block->uses.have_ended(); });
    std::for_each(unused, held_back_.end(), [this](Block* block) { release(block); });
    held_back_.erase(unused, held_back_.end());
  }

  std::mutex mutex_;
  std::map<const std::byte*, Block*> blocks_;  // all, by where they begin
  std::multimap<std::size_t, Block*> free_;
  std::vector<Block*> held_back_;
  at::HostStats stats_;
  std::optional<std::size_t> n_left_;  // without a value, as many as fit
};

// Leaked: storages freed at exit outlive every destructor.
Allocator& allocator() {
  static auto& instance = *new Allocator;
  return instance;
}

void free_block(void* block) { allocator().free(static_cast<Block*>(block)); }

}  // namespace

at::HostAllocator& host_allocator() { return allocator(); }

void refuse_pinned(std::optional<std::size_t> after) { allocator().refuse(after); }

bool is_pinned(const void* address) { return allocator().owns(address); }

}  // namespace fake
