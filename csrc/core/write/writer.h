// Writes an archive whose layout is planned to a file, to memory or to a stream, and any other
// FileBody to a file.  Workers take chunks of the file in order; each byte of a payload is read
// from memory once, for checksum and copy.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "core/io/file.h"
#include "core/memory/buffer.h"
#include "core/pipeline/pipeline.h"
#include "core/write/archive_body.h"

namespace ptsave {

// Buffers for direct writes one after another: fresh memory costs more than the copy into it.  One
// write at a time.
class DirectBuffers {
 public:
  // At least `count` buffers of at least `nbytes`.
  BufferPool& take(std::size_t count, std::size_t nbytes);
  // Gives the memory back; the next write takes new one.
  void release() { pool_.reset(); }

 private:
  std::optional<BufferPool> pool_;
  std::size_t count_ = 0;
  std::size_t nbytes_ = 0;
};

struct WriteOptions {
  bool compute_crcs = true;   // false writes 0 for every CRC, as torch does
  std::size_t n_threads = 0;  // 0: on the calling thread
  std::size_t chunk_nbytes = std::size_t{4} << 20;
  Stager* stager = nullptr;              // brings payloads that are not in host memory
  ArrivingPayloads* arriving = nullptr;  // through which those in host memory are read; optional
  // Gets the CRCs of all payloads when they are known, and may refuse them by throwing.  Optional.
  std::function<void(std::span<const std::uint32_t> crcs)> check_crcs = nullptr;
  // Nobody changes the payloads until the file is written, so that a device may read them itself:
  // between the checksum and that, another thread could change a live tensor.
  bool payloads_are_still = false;
  DirectBuffers* buffers = nullptr;  // optional
  // Threads while chunks go past the page cache.
  std::size_t n_direct_threads = 0;
  // So many of the file's first bytes go past the page cache, and the rest does where the cache is
  // expensive (MemoryGauge).  Empty: all goes through the cache.
  std::optional<std::uint64_t> direct_nbytes = std::nullopt;
  // Page-locked host memory for what comes from accelerators.
  std::size_t max_pinned_nbytes = 0;
  Priority priority = Priority::kOfCaller;  // of the threads
};

// Bytes of the file written so far; may be read from the poll callback.
using Progress = std::atomic<std::uint64_t>;

// Any body into a file, beginning at `base_offset`: a multiple of the file's block if
// direct_nbytes is set.  Of the options, chunk size and stager are the body's.  The file must
// have been cut or created so that holes read as zero.
//
// A chunk goes through the page cache, or past it as the options say, through a buffer of one chunk
// or from where a payload is if it is still and the device takes whole blocks from there.  All goes
// through the cache where the kernel refuses direct writes.
void write_to_file(FileBody& body, File& file, std::uint64_t base_offset,
                   const WriteOptions& options, Progress& progress, const Poll& poll);
// The size that chunks must have for direct writes.
std::size_t direct_chunk_nbytes(const File& file, const WriteOptions& options);

// An archive, all of it through the page cache.
void write_buffered(const ArchiveLayout& layout, const Payloads& payloads, File& file,
                    std::uint64_t base_offset, WriteOptions options, Progress& progress,
                    const Poll& poll);

// An archive or any other body, all of it past the page cache, by n_threads.
void write_direct(const ArchiveLayout& layout, const Payloads& payloads, File& file,
                  const WriteOptions& options, Progress& progress, const Poll& poll);
void write_direct(FileBody& body, File& file, std::uint64_t base_offset, WriteOptions options,
                  Progress& progress, const Poll& poll);
// Overwrites `path` in place with the `nbytes` bytes that `write` writes (0: with holes).  A save
// that reads from that very file is written to `scratch` first, which is then copied.
void overwrite(const std::string& path, File* scratch, std::uint64_t nbytes, bool durable,
               const std::function<void(File&)>& write, const Poll& poll);

// Into memory: layout.nbytes() bytes at `out`.  Holes become zeros.
void write_to_memory(const ArchiveLayout& layout, const Payloads& payloads, std::byte* out,
                     const WriteOptions& options, Progress& progress, const Poll& poll);

// Takes one piece after another, on the calling thread; `data` is null for a hole to skip.  May
// throw.
using StreamSink = std::function<void(const std::byte* data, std::uint64_t nbytes)>;

// Each piece is gone when `sink` returns.
void write_to_stream(const ArchiveLayout& layout, const Payloads& payloads, const StreamSink& sink,
                     const WriteOptions& options, Progress& progress);

// Any body, in the same way.
void write_to_stream(FileBody& body, const StreamSink& sink, const WriteOptions& options,
                     Progress& progress);

}  // namespace ptsave
