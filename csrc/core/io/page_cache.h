// The page cache: the size of writes into it, and how to fill it by folios of 2 MiB.
//
// readahead() makes pages of 4 KiB, at 1 us each, and each page is a segment of the disk's request.
// A fault in a mapping that is advised to use huge pages has the kernel fetch 2 MiB at once: 512
// MiB in 5 ms of system time instead of 130 (Linux 6.18, ext4).  Kernels and file systems without
// large folios fetch the same 2 MiB in pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "core/io/file.h"

namespace ptsave {

// The largest piece of a write into the page cache.  A piece's size bounds the memory blocks that
// the kernel takes for it.  Blocks up to this size come from fragments.  A virtual machine's host
// takes larger free blocks back, and the first use of such a block costs a fault in the host.
// Writing 1.1 GB took 0.23 s in pieces of 256 KiB and 2.0 s in pieces of 1 MiB; warm, both took 0.2
// s.
inline constexpr std::size_t kCacheWriteNbytes = std::size_t{256} << 10;

// A mapping of a whole file, made when it is first needed.  Its memory is never read, because
// reading it kills the process if the file was truncated meanwhile.  Safe for concurrent use.
class PageCacheFiller {
 public:
  PageCacheFiller() = default;
  PageCacheFiller(const PageCacheFiller&) = delete;
  PageCacheFiller& operator=(const PageCacheFiller&) = delete;
  ~PageCacheFiller();

  // Fetches the missing pages of a range of `file` (always the same file) into the page cache, and
  // waits for them.  False if the system cannot do that, or if the file has become shorter.
  bool fill(const File& file, std::uint64_t offset, std::uint64_t nbytes) noexcept;

 private:
  void map(const File& file) noexcept;

  std::once_flag mapped_;
  std::byte* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
};

}  // namespace ptsave
