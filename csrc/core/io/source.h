// Sources of an archive's bytes: a file, through the page cache or past it, or memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <semaphore>
#include <string>
#include <utility>

#include "core/io/file.h"

namespace ptsave {

// Tracks the first bytes of a load, which are read through the page cache, because other ranks may
// start some milliseconds later.  The files of one checkpoint share this object.  Safe for
// concurrent use.
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

// Detects other readers of a file.
//
// Reading past the page cache is fastest for the only reader of a file.  But if eight ranks of one
// host load the same checkpoint that way, they fetch it eight times.  Through the page cache, each
// byte is fetched once.
//
// An object of this class stands for one reader of one file.  While it lives, all other readers on
// this host and in this process can see it.  Safe for concurrent use.
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

// Fills the page cache with folios of 2 MiB.
//
// readahead() makes pages of 4 KiB, at 1 us each, and each page is a segment of the disk's request.
// A fault in a mapping that is advised to use huge pages makes the kernel fetch 2 MiB at once: 512
// MiB in 5 ms of system time instead of 130 (Linux 6.18, ext4).  Kernels and file systems without
// large folios fetch the same 2 MiB in pages.
//
// The filler is a mapping of a whole file, made when it is first needed.  Its memory is never read,
// because reading it kills the process if the file was truncated meanwhile.  Safe for concurrent
// use.
class PageCacheFiller {
 public:
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

// Lets at most half of a transfer's threads wait for the disk at a time.
//
// Concurrent requests to a disk tend to end at the same time: a virtual disk answers when its queue
// is empty.  If every thread waited for it, all would then checksum and copy at once, and the disk
// would be idle (a quarter of a cold load's time on two cores).  Here the threads that hold a
// buffer and wait for a slot send the next requests.
//
// Safe for concurrent use.
class ReadSlots {
 public:
  explicit ReadSlots(std::size_t n_threads)
      : free_(static_cast<std::ptrdiff_t>(std::max<std::size_t>(n_threads / 2, 1))) {}

  // A thread may wait for the disk while it holds this object's lock (std::lock_guard).
  void lock() { free_.acquire(); }
  void unlock() { free_.release(); }

 private:
  std::counting_semaphore<> free_;
};

// Whether to read a file past the page cache, if its file system allows that.
enum class DirectReads : std::uint8_t {
  kNever,
  kAlone,  // while there are no other readers: CoReaders
  kAlways,
};

// The mode of a load.  `allowed`: whether the caller permits direct reads.
constexpr DirectReads direct_reads(bool allowed) {
  return allowed ? DirectReads::kAlone : DirectReads::kNever;
}

// A part of a file, or memory.  Safe for concurrent use.
class ByteSource {
 public:
  // The archive is `file` from base_offset on.  A load of several files passes a common `start`.
  ByteSource(File file, std::uint64_t base_offset, DirectReads direct = DirectReads::kAlone,
             std::shared_ptr<SharedStart> start = nullptr);
  // The bytes must outlive the source and stay unchanged.
  ByteSource(const std::byte* data, std::uint64_t nbytes, std::string name);
  // Stands for a file that is closed at present: reading it is an IoError.
  static ByteSource closed(std::uint64_t nbytes, std::string name) {
    return {nullptr, nbytes, std::move(name)};
  }

  const std::string& name() const { return name_; }
  std::uint64_t nbytes() const { return nbytes_; }
  // The file's descriptor; -1 if there is no file.
  int descriptor() const { return file_ ? file_->fd() : -1; }
  // The archive's bytes, if they are in memory; else null.
  const std::byte* memory() const { return memory_; }
  // Announces this reader before its first read, which may come late in a load of several files.
  void announce() const;
  void read_at(std::uint64_t offset, void* data, std::size_t nbytes) const;
  // Whether the page cache may hold some of these bytes.
  bool may_be_cached(std::uint64_t offset, std::size_t nbytes) const;
  // Reads only bytes that the page cache holds, without waiting; returns their number.
  std::size_t read_cached(std::uint64_t offset, void* data, std::size_t nbytes) const;
  // Asks the file system to fetch these bytes into the page cache.  Fetches large pieces of a file
  // with other readers in whole folios, which may be more than one reader needs, and waits for
  // them.
  void read_ahead(std::uint64_t offset, std::size_t nbytes) const;
  // Direct reads begin and end at multiples of this, at most a page.
  std::size_t block_nbytes() const { return block_nbytes_; }
  // Reads whole blocks past the page cache, up to the end of the file: offset and nbytes are
  // multiples of block_nbytes(), data is page-aligned.  Returns false if direct reads do not work
  // or are not wanted.
  bool read_direct(std::uint64_t offset, void* data, std::size_t nbytes) const;

 private:
  const File& file() const;
  bool is_shared() const { return is_told_ || (co_readers_ && co_readers_->found()); }

  std::optional<File> file_;
  Descriptor direct_;
  std::size_t block_nbytes_ = DirectIoAlignment::kMinBlockNbytes;
  bool is_remote_ = false;
  bool is_told_ = false;                           // DirectReads::kNever
  std::unique_ptr<CoReaders> co_readers_;          // DirectReads::kAlone
  std::unique_ptr<PageCacheFiller> cache_filler_;  // of a file
  const std::byte* memory_ = nullptr;
  std::uint64_t base_offset_ = 0;
  std::uint64_t nbytes_ = 0;
  std::string name_;
};

}  // namespace ptsave
