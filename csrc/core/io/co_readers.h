// Detects other readers of a file.
//
// Reading past the page cache is fastest for the only reader of a file.  But if eight ranks of one
// host load the same checkpoint that way, they fetch it eight times.  Through the page cache, each
// byte is fetched once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "core/io/file.h"

namespace ptsave {

// The beginning of a load, read through the page cache, because ranks start some milliseconds
// apart.  The files of one checkpoint share it.  Safe for concurrent use.
class SharedStart {
 public:
  // Bytes read before the first direct read.
  static constexpr std::uint64_t kNbytes = std::uint64_t{32} << 20;

  // Counts these bytes, and returns whether the beginning was over before them.
  bool is_over(std::uint64_t nbytes) {
    return nbytes_.fetch_add(nbytes, std::memory_order_relaxed) >= kNbytes;
  }

 private:
  std::atomic<std::uint64_t> nbytes_{0};
};

// One reader of one file, visible to all other readers on this host and in this process while it
// lives.  Safe for concurrent use.
//
// A reader announces itself by a lock on a byte beyond the end of every file.  It is an
// open-file-description lock: the kernel releases it when the holder dies.  No reader waits for it.
class CoReaders {
 public:
  explicit CoReaders(std::shared_ptr<SharedStart> start) : start_(std::move(start)) {}

  // Announces this reader of `file` (always the same file), unless absent() has done so.
  void announce(const File& file);
  // Returns whether the next `nbytes` of `file` are better read past the page cache.
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
