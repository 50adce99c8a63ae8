// Memory of simulated devices, also of the stand-in for CUDA.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <stdexcept>

namespace simulated {

// What fresh and freed memory holds.
inline constexpr int kPoison = 0xDB;

// The addresses of a device.  The host cannot touch them; operations use a second mapping of the
// same memory.
class AddressSpace {
 public:
  AddressSpace() {
    const int fd = ::memfd_create("simulated-device", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(kNbytes)) != 0) {
      throw std::runtime_error("no memory for a device");
    }
    device_ = mapped(fd, PROT_NONE);
    accessible_ = mapped(fd, PROT_READ | PROT_WRITE);
    ::madvise(accessible_, kNbytes, MADV_DONTFORK);
    ::close(fd);
  }
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  bool contains(const void* address) const {
    const auto* byte = static_cast<const std::byte*>(address);
    return byte >= device_ && byte < device_ + kNbytes;
  }
  std::byte* accessible(const void* address) const {
    return accessible_ + (static_cast<const std::byte*>(address) - device_);
  }
  // Returns addresses that were not taken before, or null if there are too few.
  std::byte* take(std::size_t nbytes) {
    if (nbytes > kNbytes - taken_) return nullptr;
    taken_ += nbytes;
    return device_ + taken_ - nbytes;
  }

 private:
  static constexpr std::size_t kNbytes = std::size_t{1} << 38;

  static std::byte* mapped(int fd, int protection) {
    void* address = ::mmap(nullptr, kNbytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address == MAP_FAILED) throw std::runtime_error("no addresses for a device");
    ::madvise(address, kNbytes, MADV_DONTDUMP);
    return static_cast<std::byte*>(address);
  }

  std::byte* device_ = nullptr;
  std::byte* accessible_ = nullptr;
  std::size_t taken_ = 0;
};

}  // namespace simulated
