// Memory of the devices, which faults when the host touches it, and pinned memory of the host.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>

#include "state.h"

namespace standin {

// What fresh and freed memory of a device holds.
inline constexpr int kPoison = 0xDB;
inline constexpr std::size_t kDeviceNbytes = std::size_t{8} << 30;
inline constexpr std::size_t kPageNbytes = 4096;

// Blocks of memory, by their first bytes.
class Blocks {
 public:
  void add(const void* address, std::size_t nbytes) {
    const std::lock_guard lock(mutex_);
    sizes_[address] = nbytes;
    nbytes_ += nbytes;
    peak_ = std::max(peak_, nbytes_);
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
  std::size_t peak() {
    const std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = nbytes_;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::size_t> sizes_;
  std::size_t nbytes_ = 0;
  std::size_t peak_ = 0;
};

// A device's addresses.  The host cannot touch them; operations use a second mapping of the same
// memory.  No address is used twice, so that uses of freed memory are found.
class DeviceMemory {
 public:
  DeviceMemory() {
    const int fd = ::memfd_create("standin", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(kAddresses)) != 0) {
      throw std::runtime_error("no memory for a device");
    }
    device_ = mapped(fd, PROT_NONE);
    accessible_ = mapped(fd, PROT_READ | PROT_WRITE);
    ::madvise(accessible_, kAddresses, MADV_DONTFORK);
    ::close(fd);
  }

  // Returns null if the device is full.
  void* allocate(std::size_t nbytes) {
    nbytes = (nbytes + kPageNbytes - 1) / kPageNbytes * kPageNbytes;
    const std::lock_guard lock(mutex_);
    if (nbytes > free_nbytes() || nbytes > kAddresses - taken_) return nullptr;
    std::byte* const block = device_ + taken_;
    taken_ += nbytes;
    blocks_.add(block, nbytes);
    std::memset(accessible(block), kPoison, nbytes);
    return block;
  }
  bool release(const void* block) {
    const std::size_t nbytes = blocks_.remove(block);
    if (nbytes > 0) ::madvise(accessible(block), nbytes, MADV_REMOVE);
    return nbytes > 0;
  }

  bool has_address(const void* address) const {
    const auto* byte = static_cast<const std::byte*>(address);
    return byte >= device_ && byte < device_ + kAddresses;
  }
  bool is_allocated(const void* address, std::size_t nbytes) {
    return blocks_.have(address, nbytes);
  }
  std::byte* accessible(const void* address) const {
    return accessible_ + (static_cast<const std::byte*>(address) - device_);
  }
  std::size_t free_nbytes() { return kDeviceNbytes - blocks_.nbytes(); }

 private:
  static constexpr std::size_t kAddresses = std::size_t{1} << 38;

  static std::byte* mapped(int fd, int protection) {
    void* address = ::mmap(nullptr, kAddresses, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address == MAP_FAILED) throw std::runtime_error("no addresses for a device");
    ::madvise(address, kAddresses, MADV_DONTDUMP);
    return static_cast<std::byte*>(address);
  }

  std::byte* device_ = nullptr;
  std::byte* accessible_ = nullptr;
  Blocks blocks_;
  std::mutex mutex_;
  std::size_t taken_ = 0;
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
