// Reads parts of files into memory that exists already: the tensors of a format that is a header
// and bytes, such as safetensors, of all of a model's files at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/buffer.h"
#include "core/pipeline.h"
#include "core/source.h"

namespace ptsave {

// A part of a file and the memory it belongs in.
struct FileRange {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
};

// One reading of many ranges.  Their memory must outlive it.  One thread at a time, but for
// nbytes_read().
class RangeRead {
 public:
  // std::invalid_argument for a range of no file and for ranges that overlap in a file; IoError for
  // one beyond the end of its file.  (Places must not overlap either; nobody checks that.)
  RangeRead(std::vector<ArchiveSource> files, std::vector<FileRange> ranges);

  // Returns when all bytes are in their places.  IoError.
  void run(std::size_t n_threads, const Poll& poll);
  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

 private:
  // Ranges, or parts of them, that are read together: [begin, end) of one file.
  struct Chunk {
    std::size_t file = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t first_range = 0;
    std::size_t end_range = 0;
  };

  void check_ranges() const;
  void cut();
  void read(const Chunk& chunk);
  std::uint64_t read_cached(const Chunk& chunk) const;
  bool read_direct(const Chunk& chunk, std::uint64_t begin);
  template <class Take>
  void for_each_piece(const Chunk& chunk, std::uint64_t begin, const Take& take) const;

  std::vector<ArchiveSource> files_;
  std::vector<FileRange> ranges_;  // by file and offset
  std::vector<Chunk> chunks_;
  std::unique_ptr<BufferPool> buffers_;
  std::atomic<std::uint64_t> nbytes_read_{0};
};

}  // namespace ptsave
