// The page cache: whether it takes bytes cheaply, and how to fill it with a file by folios of 2
// MiB.
//
// readahead() makes pages of 4 KiB, at 1 us each, and a disk takes such pages as so many segments.
// A fault in a mapping that is advised to use huge pages has the kernel fetch 2 MiB at once: 512
// MiB in 5 ms of system time instead of 130 (Linux 6.18, ext4).  Kernels and file systems without
// large folios fetch the same 2 MiB in pages.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "core/io/file.h"

namespace ptsave {

// The largest piece of a write into the page cache.  A piece's size bounds the memory blocks that
// the kernel takes for it.  Blocks up to this size come from fragments.  A virtual machine's host
// takes larger free blocks back, and the first use of one costs a fault in the host: 1.1 GB took
// 0.23 s in pieces of 256 KiB, 2.0 s in pieces of 1 MiB, and 0.2 s in both once the memory was
// warm.
inline constexpr std::size_t kCacheWriteNbytes = std::size_t{256} << 10;

// Tells from the first pieces of a file whether the page cache takes the rest cheaply.  Where the
// host has taken all free memory back, 4 MiB cost 12 to 25 ms of processor time, and 1 to 3 ms
// elsewhere; past the cache they cost 1.6 ms always.  Safe for concurrent use.
class CacheGauge {
 public:
  // A piece of a file took so much processor time to write.
  void note(std::size_t nbytes, std::chrono::nanoseconds took) noexcept {
    const auto expected = kCheapTimePerKib * static_cast<std::int64_t>(nbytes >> 10);
    const std::int64_t loss = std::min(took - expected, kMaxLoss).count();
    // Time won earlier does not offset a later loss: the account never falls below zero.
    std::int64_t before = loss_ns_.load(std::memory_order_relaxed);
    while (!loss_ns_.compare_exchange_weak(before, std::max<std::int64_t>(before + loss, 0),
                                           std::memory_order_relaxed)) {
    }
    if (before + loss > kBearableLoss.count()) is_cheap_.store(false, std::memory_order_relaxed);
  }
  // Once false it stays false: the next file has a gauge of its own.
  bool is_cheap() const noexcept { return is_cheap_.load(std::memory_order_relaxed); }

 private:
  // Twice the usual time, the most that one piece counts for (a virtual machine's host stops the
  // processor now and then), and the loss at which the cache is given up.
  static constexpr std::chrono::nanoseconds kCheapTimePerKib{700};
  static constexpr std::chrono::nanoseconds kMaxLoss = std::chrono::milliseconds{2};
  static constexpr std::chrono::nanoseconds kBearableLoss = std::chrono::milliseconds{8};

  std::atomic<std::int64_t> loss_ns_{0};
  std::atomic<bool> is_cheap_{true};
};

// A mapping of a whole file, made when it is first needed.  Nobody looks into it, because a file
// that is cut while it is mapped kills who does.  Safe for concurrent use.
class PageCacheFiller {
 public:
  PageCacheFiller() = default;
  PageCacheFiller(const PageCacheFiller&) = delete;
  PageCacheFiller& operator=(const PageCacheFiller&) = delete;
  ~PageCacheFiller();

  // Fetches what the page cache does not hold of a part of `file` (always the same one), and waits
  // for it.  False where the system cannot do that, or the file has become shorter.
  bool fill(const File& file, std::uint64_t offset, std::uint64_t nbytes) noexcept;

 private:
  void map(const File& file) noexcept;

  std::once_flag mapped_;
  std::byte* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
};

}  // namespace ptsave
