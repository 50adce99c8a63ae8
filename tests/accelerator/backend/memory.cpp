#include "memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "address_space.h"
#include "context.h"
#include "stream.h"

namespace fake {
namespace {

using simulated::AddressSpace;

constexpr std::size_t kAlignment = 512;

AddressSpace& address_space(c10::DeviceIndex device) {
  static auto& spaces = *new std::array<AddressSpace, kDeviceCount>;
  return spaces.at(static_cast<std::size_t>(device));
}

}  // namespace

std::optional<c10::Device> device_of_address(const void* address) {
  for (c10::DeviceIndex device = 0; device < kDeviceCount; ++device) {
    if (address_space(device).contains(address)) {
      return device_of(device);
    }
  }
  return std::nullopt;
}

std::byte* accessible(const void* device_address) {
  const auto device = device_of_address(device_address);
  TORCH_CHECK(device.has_value(), "fake: ", device_address, " is not an address of a device");
  return address_space(device->index()).accessible(device_address);
}

namespace {

struct Block {
  c10::Stream stream;  // the one that it belongs to
  std::byte* address;
  std::size_t size;
  std::size_t allocated;  // of which that much was, as the statistics have it
  std::size_t requested;
  Uses uses;
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;

c10::CachingAllocator::Stat& aggregate(c10::CachingAllocator::StatArray& stats) {
  return stats.at(static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE));
}

void poison(const Block& block) {
  queue_of(block.stream).enqueue_poison([data = accessible(block.address), size = block.size] {
    std::memset(data, simulated::kPoison, size);
  });
}

void free_block(void* block);

class Allocator final : public c10::DeviceAllocator {
 public:
  bool initialized() override { return true; }

  c10::DataPtr allocate(std::size_t size) override {
    const c10::DeviceIndex device = current_device();
    use_current_device();
    if (size == 0) {
      return {nullptr, nullptr, &free_block, device_of(device)};
    }
    const c10::Stream stream = current_stream(device);
    const std::size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard lock(mutex_);
    Pool& own = pool(device);
    release_unused(own);
    Block* block = take_cached(own, stream.id(), rounded);
    if (block == nullptr) {
      block = take_fresh(own, stream, rounded);
    }
    block->allocated = rounded;
    block->requested = size;
    aggregate(own.stats.allocation).increase(1);
    aggregate(own.stats.allocated_bytes).increase(rounded);
    aggregate(own.stats.requested_bytes).increase(size);
    return {block->address, block, &free_block, device_of(device)};
  }

  // As CUDA: only other streams' uses need the driver, which fails in a forked child.
  void free(Block* block) {
    if (block == nullptr) {
      return;
    }
    if (in_forked_child()) {
      TORCH_CHECK(block->uses.are_none(), "fake: cannot use the device in a forked child");
      return;
    }
    const std::lock_guard lock(mutex_);
    Pool& own = pool(block->stream.device_index());
    aggregate(own.stats.allocation).decrease(1);
    aggregate(own.stats.allocated_bytes).decrease(block->allocated);
    aggregate(own.stats.requested_bytes).decrease(block->requested);
    block->uses.free();
    if (block->uses.have_ended()) {
      release(own, block);
    } else {
      own.held_back.push_back(block);
    }
  }

  void emptyCache(c10::MempoolId_t /*pool*/) override {
    C10_THROW_ERROR(NotImplementedError, "fake: memory of a device is not given back");
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    // As CUDA: empty storages and memory of others have no block to hold back.
    if (data.get_context() == nullptr || data.get_deleter() != &free_block) {
      return;
    }
    auto* block = static_cast<Block*>(data.get_context());
    const std::lock_guard lock(mutex_);
    if (stream != block->stream) {
      block->uses.record(stream);
    }
  }

  Stats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    return pool(device).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    Stats& stats = pool(device).stats;
    for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.requested_bytes}) {
      aggregate(*stat).reset_accumulated();
    }
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    Stats& stats = pool(device).stats;
    for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.requested_bytes}) {
      aggregate(*stat).reset_peak();
    }
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    const auto device = device_of_address(dest);
    TORCH_CHECK(device.has_value(), "fake: ", dest, " is not an address of a device");
    enqueue(current_stream(device->index()), [to = accessible(dest), from = accessible(src),
                                              count] { std::memcpy(to, from, count); });
  }

 private:
  struct Pool {
    std::map<c10::StreamId, std::multimap<std::size_t, Block*>> free;
    std::vector<Block*> held_back;
    Stats stats;
  };

  Pool& pool(c10::DeviceIndex device) {
    check_device(device);
    return pools_.at(static_cast<std::size_t>(device));
  }

  Block* take_cached(Pool& pool, c10::StreamId stream, std::size_t size) {
    auto& blocks = pool.free[stream];
    const auto found = blocks.lower_bound(size);
    if (found == blocks.end() || found->first > 2 * size) {
      return nullptr;
    }
    Block* block = found->second;
    blocks.erase(found);
    return block;
  }

  static Block* take_fresh(Pool& pool, const c10::Stream& stream, std::size_t size) {
    std::byte* address = address_space(stream.device_index()).take(size);
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "fake: no memory for ", size, " bytes");
    auto* block = new Block{stream, address, size, 0, 0, {}};
    aggregate(pool.stats.segment).increase(1);
    aggregate(pool.stats.reserved_bytes).increase(size);
    poison(*block);
    return block;
  }

  static void release(Pool& pool, Block* block) {
    poison(*block);
    // What was freed last is handed out first: that is where a mistake shows.
    auto& blocks = pool.free[block->stream.id()];
    blocks.emplace_hint(blocks.lower_bound(block->size), block->size, block);
  }

  static void release_unused(Pool& pool) {
    const auto unused =
        std::stable_partition(pool.held_back.begin(), pool.held_back.end(),
                              [](const Block* block) { return !block->uses.have_ended(); });
    std::for_each(unused, pool.held_back.end(), [&](Block* block) { release(pool, block); });
    pool.held_back.erase(unused, pool.held_back.end());
  }

  std::mutex mutex_;
  std::array<Pool, kDeviceCount> pools_;
};

Allocator& allocator() {
  static auto& instance = *new Allocator;
  return instance;
}

void free_block(void* block) { allocator().free(static_cast<Block*>(block)); }

}  // namespace

c10::DeviceAllocator& device_allocator() { return allocator(); }

}  // namespace fake
