// Detects other readers of a file.
//
// Past the page cache is the fastest way for the only reader of a file.  Eight ranks of one host
// that load the same checkpoint would fetch it eight times that way; through the page cache they
// fetch each byte once, all of them together.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/io/file.h"

namespace ptsave {

// One reader of one file, as long as it lives, known to all others on this host and in this
// process. Safe for concurrent use.
//
// A reader announces itself by a lock on a byte that no file has: an open-file-description lock,
// which the kernel takes back when its holder dies, and for which nobody waits.
class CoReaders {
 public:
  // Bytes read through the page cache before the first direct read, because ranks that are started
  // together are some milliseconds apart.
  static constexpr std::uint64_t kSharedStartNbytes = std::uint64_t{32} << 20;

  // Whether the next `nbytes` of `file` (always the same one) are better read past the page cache.
  bool absent(const File& file, std::uint64_t nbytes);
  // Whether absent() has ever found another reader.
  bool found() const { return found_.load(std::memory_order_relaxed); }

 private:
  std::once_flag announced_;
  Descriptor announcement_;
  std::atomic<std::uint64_t> nbytes_{0};
  std::atomic<bool> found_{false};
};

}  // namespace ptsave
