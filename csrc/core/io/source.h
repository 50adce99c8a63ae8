// Sources of an archive's bytes: a file, through the page cache or past it, or memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/io/co_readers.h"
#include "core/io/file.h"
#include "core/io/page_cache.h"

namespace ptsave {

// Whether to read a file past the page cache, if its file system allows that.
enum class DirectReads : std::uint8_t {
  kNever,
  kAlone,  // while there are no other readers: CoReaders
  kAlways,
};

// The mode of a load, by the caller's permission to read directly.
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
  // multiples of block_nbytes(), data is page-aligned.  False if they do not work or are not
  // wanted.
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
