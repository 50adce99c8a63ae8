// Writes a file chunk by chunk: a FileBody produces the bytes, and a ChunkSink takes them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/pipeline/pipeline.h"

namespace ptsave {

// A half-open range of positions in the file.
struct ByteRange {
  std::uint64_t begin;
  std::uint64_t end;

  std::uint64_t nbytes() const { return end - begin; }
  bool empty() const { return begin >= end; }
};

inline ByteRange intersect(ByteRange a, ByteRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Takes the bytes of one chunk, in file order.
class ChunkSink {
 public:
  virtual ~ChunkSink() = default;
  // Takes a piece of a payload, which stays valid until the chunk is done.  Returns `crc` continued
  // over it, or any value if checksums are off.
  virtual std::uint32_t put_payload(const std::byte* data, std::size_t nbytes,
                                    std::uint32_t crc) = 0;
  // Takes bytes that are valid only during the call.
  virtual void put_seam(const std::byte* data, std::size_t nbytes) = 0;
  virtual void put_hole(std::uint64_t nbytes) = 0;
};

// A file except its small tail, which is known when all else has been produced.
class FileBody {
 public:
  FileBody(std::uint64_t nbytes, std::size_t chunk_nbytes)
      : nbytes_(nbytes),
        chunk_nbytes_(chunk_nbytes),
        n_chunks_((nbytes + chunk_nbytes - 1) / chunk_nbytes) {}
  FileBody(const FileBody&) = delete;
  FileBody& operator=(const FileBody&) = delete;
  virtual ~FileBody() = default;

  std::uint64_t nbytes() const { return nbytes_; }
  std::size_t chunk_nbytes() const { return chunk_nbytes_; }
  std::size_t n_chunks() const { return n_chunks_; }
  ByteRange chunk_range(std::size_t chunk) const {
    const std::uint64_t begin = std::uint64_t{chunk} * chunk_nbytes_;
    return {begin, std::min<std::uint64_t>(begin + chunk_nbytes_, nbytes_)};
  }

  // Hands the bytes of `chunk` to `sink`.  Call once for each chunk; safe for concurrent use on
  // different chunks of one pipeline.
  virtual void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) = 0;
  // Makes the tail's parts that need no chunk, on a thread that would only wait.  Optional.
  virtual void prepare_tail() {}
  // The rest of the file; called when every chunk has been produced.
  virtual std::string tail() = 0;
  // Every payload's CRC; called after tail().
  virtual std::span<const std::uint32_t> crcs() = 0;

 private:
  const std::uint64_t nbytes_;
  const std::size_t chunk_nbytes_;
  const std::size_t n_chunks_;
};

}  // namespace ptsave
