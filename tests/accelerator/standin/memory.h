// Memory of the devices, which faults when the host touches it, and pinned memory of the host.
#pragma once

#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "../backend/address_space.h"
#include "state.h"

namespace standin {

inline constexpr std::size_t kDeviceNbytes = std::size_t{8} << 30;
inline constexpr std::size_t kPageNbytes = 4096;

// Blocks of memory, by their first bytes.
class Blocks {
 public:
  void add(const void* address, std::size_t nbytes) {
    const std::lock_guard lock(mutex_);
    sizes_[address] = nbytes;
    nbytes_ += nbytes;
  }
  // Returns the size of the removed block, 0 if there is none.
  std::size_t remove(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(address);
    if (found == sizes_.end()) return 0;
    const std::size_t nbytes = found->second;
    nbytes_ -= nbytes;
    sizes_.erase(found);
    return nbytes;
  }
  // Whether one block has all of these bytes.
  bool have(const void* address, std::size_t nbytes) {
    const std::lock_guard lock(mutex_);
    const auto after = sizes_.upper_bound(address);
    if (after == sizes_.begin()) return false;
    const auto& [first, size] = *std::prev(after);
    const auto offset =
        static_cast<const std::byte*>(address) - static_cast<const std::byte*>(first);
    return static_cast<std::size_t>(offset) + nbytes <= size;
  }

  std::size_t nbytes() {
    const std::lock_guard lock(mutex_);
    return nbytes_;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::size_t> sizes_;
  std::size_t nbytes_ = 0;
};

// The memory of a device.  No address is used twice, so that uses of freed memory are found.
class DeviceMemory {
 public:
  // Returns null if the device is full.
  void* allocate(std::size_t nbytes) {
    nbytes = (nbytes + kPageNbytes - 1) / kPageNbytes * kPageNbytes;
    const std::lock_guard lock(mutex_);
    std::byte* const block = nbytes > free_nbytes() ? nullptr : addresses_.take(nbytes);
    if (block == nullptr) return nullptr;
    blocks_.add(block, nbytes);
    std::memset(accessible(block), simulated::kPoison, nbytes);
    return block;
  }
  bool release(const void* block) {
    const std::size_t nbytes = blocks_.remove(block);
    if (nbytes > 0) ::madvise(accessible(block), nbytes, MADV_REMOVE);
    return nbytes > 0;
  }

  bool has_address(const void* address) const { return addresses_.contains(address); }
  bool is_allocated(const void* address, std::size_t nbytes) {
    return blocks_.have(address, nbytes);
  }
  std::byte* accessible(const void* address) const { return addresses_.accessible(address); }
  std::size_t free_nbytes() { return kDeviceNbytes - blocks_.nbytes(); }

 private:
  simulated::AddressSpace addresses_;
  Blocks blocks_;
  std::mutex mutex_;
};

inline DeviceMemory& device_memory(int device) {
  static auto& instances = *new std::array<DeviceMemory, kDevices>;
  return instances.at(static_cast<std::size_t>(device));
}

inline Blocks& pinned_memory() {
  static auto& instance = *new Blocks;
  return instance;
}

// Where bytes are, and the address at which operations reach them.
struct Place {
  enum Kind { kPageable, kPinned, kDevice, kNowhere };

  bool is(Kind other) const { return kind == other; }

  Kind kind = kPageable;
  std::byte* data = nullptr;
  int device = cudaInvalidDeviceId;
};

inline Place place_of(const void* address, std::size_t nbytes) {
  for (int device = 0; device < kDevices; ++device) {
    DeviceMemory& memory = device_memory(device);
    if (!memory.has_address(address)) continue;
    if (!memory.is_allocated(address, nbytes)) return {Place::kNowhere, nullptr, device};
    return {Place::kDevice, memory.accessible(address), device};
  }
  auto* data = static_cast<std::byte*>(const_cast<void*>(address));
  return {pinned_memory().have(address, nbytes) ? Place::kPinned : Place::kPageable, data};
}

}  // namespace standin
