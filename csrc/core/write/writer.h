// Writes a planned archive to a file, memory or a stream, and other bodies to files or streams.
// Workers take the file's chunks in order; each byte of a payload is read from memory once, for
// checksum and copy.
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
#include "core/write/file_body.h"

namespace ptsave {

class Sharing;

// Keeps buffers between direct writes: fresh memory costs more than the copy.  One write at a time.
class DirectBuffers {
 public:
  // Returns at least `count` buffers of at least `nbytes`.
  BufferPool& take(std::size_t count, std::size_t nbytes);
  // Frees the memory; the next write allocates again.
  void release() { pool_.reset(); }

 private:
  std::optional<BufferPool> pool_;
  std::size_t count_ = 0;
  std::size_t nbytes_ = 0;
};

struct WriteOptions {
  bool compute_crcs = true;   // false writes 0 for every CRC, as torch does
  std::size_t n_threads = 0;  // 0: the calling thread
  std::size_t chunk_nbytes = std::size_t{4} << 20;
  Stager* stager = nullptr;              // for payloads that are not in host memory
  ArrivingPayloads* arriving = nullptr;  // reads payloads in host memory; optional
  // Receives the CRCs of all payloads, and may refuse them by throwing.  Optional.
  std::function<void(std::span<const std::uint32_t> crcs)> check_crcs = nullptr;
  // Whether payloads stay unchanged until the file is written.  Only then may the device read them
  // directly, because another thread could change a live tensor after the checksum.
  bool payloads_are_still = false;
  DirectBuffers* buffers = nullptr;  // optional
  Sharing* sharing = nullptr;        // shares blocks with an older file; optional
  // The number of threads while chunks go past the page cache.
  std::size_t n_direct_threads = 0;
  // This many of the file's first bytes go past the page cache; the rest goes past it only if the
  // cache is expensive (MemoryGauge).  Empty: everything goes through the cache.
  std::optional<std::uint64_t> direct_nbytes = std::nullopt;
  // Page-locked host memory for payloads from accelerators.
  std::size_t max_pinned_nbytes = 0;
  Priority priority = Priority::kOfCaller;  // the threads' priority
};

// Bytes of the file written so far; may be read from the poll callback.
using Progress = std::atomic<std::uint64_t>;

// Writes any body into a file at `base_offset`, which is a multiple of the file's block if
// direct_nbytes is set.  The options must have the body's chunk size and stager.  The file must be
// truncated or new, so that holes read as zero.
//
// The options decide whether a chunk goes through the page cache or past it.  Past it, bytes go
// through a buffer of one chunk, except blocks that the device can take from an unchanging payload.
// If the kernel refuses direct writes, everything goes through the cache.
void write_to_file(FileBody& body, File& file, std::uint64_t base_offset,
                   const WriteOptions& options, Progress& progress, const Poll& poll);
// The chunk size for direct writes: options.chunk_nbytes, rounded up to whole blocks.
std::size_t direct_chunk_nbytes(const File& file, const WriteOptions& options);

// Writes past the page cache, on n_threads threads.
void write_direct(FileBody& body, File& file, std::uint64_t base_offset, WriteOptions options,
                  Progress& progress, const Poll& poll);
// Overwrites `path` in place with the `nbytes` bytes that `write` writes (0 if it leaves holes).
// With `scratch`, for a save that reads from that same file, writes to `scratch` first and then
// copies.
void overwrite(const std::string& path, File* scratch, std::uint64_t nbytes, bool durable,
               const std::function<void(File&)>& write, const Poll& poll);

// Writes all bytes to `out`; holes become zeros.
void write_to_memory(FileBody& body, std::byte* out, const WriteOptions& options,
                     Progress& progress, const Poll& poll);

// Receives a file by pieces, on the calling thread; `data` is null for a hole to skip.  May throw.
using StreamSink = std::function<void(const std::byte* data, std::uint64_t nbytes)>;

// Passes the file to `sink`; each piece is valid only during the call.
void write_to_stream(FileBody& body, const StreamSink& sink, const WriteOptions& options,
                     Progress& progress);

}  // namespace ptsave
