// Detects other readers of a file.
//
// Past the page cache is the fastest way for the only reader of a file.  Eight ranks of one host
// that load the same checkpoint would fetch it eight times that way; through the page cache they
// fetch each byte once, all of them together.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "core/io/file.h"

namespace ptsave {

// The beginning of a load, read through the page cache because ranks that are started together are
// some milliseconds apart.  The files of one checkpoint share it.  Safe for concurrent use.
class SharedStart {
 public:
  // Bytes read before the first direct read.
  static constexpr std::uint64_t kNbytes = std::uint64_t{32} << 20;

  // Whether it was over before these bytes, which count from now on.
  bool is_over(std::uint64_t nbytes) {
    return nbytes_.fetch_add(nbytes, std::memory_order_relaxed) >= kNbytes;
  }

 private:
  std::atomic<std::uint64_t> nbytes_{0};
};

// One reader of one file, as long as it lives, known to all others on this host and in this
// process. Safe for concurrent use.
//
// A reader announces itself by a lock on a byte that no file has: an open-file-description lock,
// which the kernel takes back when its holder dies, and for which nobody waits.
class CoReaders {
 public:
  explicit CoReaders(std::shared_ptr<SharedStart> start) : start_(std::move(start)) {}

  // Lets others know of this reader of `file` (always the same one), if absent() has not yet.
  void announce(const File& file);
  // Whether the next `nbytes` of `file` are better read past the page cache.
  bool absent(const File& file, std::uint64_t nbytes);
  // Whether absent() has ever found another reader.
  bool found() const { return found_.load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<SharedStart> start_;
  std::once_flag announced_;
  Descriptor announcement_;
  std::atomic<bool> found_{false};
};

}  // namespace ptsave
