// Parts of files and the memory they belong in, cut into stretches that are read together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/io/source.h"
#include "core/memory/buffer.h"

namespace ptsave {

// A part of a file and the memory it belongs in.
struct FileRange {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
};

// Ranges in the order of files and offsets.  Safe for concurrent use: each stretch is read by
// itself.
class RangeList {
 public:
  // Size of the window of a file in which a stretch lies, and of a buffer through which it is read.
  static constexpr std::size_t kWindowNbytes = kHugePageNbytes;

  // std::invalid_argument for a range of no file; IoError for one beyond the end of its file.
  // `files` must outlive the list.
  RangeList(std::span<const ByteSource> files, std::vector<FileRange> ranges);

  std::span<const FileRange> ranges() const { return ranges_; }
  std::size_t n_stretches() const { return stretches_.size(); }
  // Size of a stretch, gaps between ranges included.
  std::uint64_t stretch_nbytes(std::size_t i) const {
    return stretches_[i].end - stretches_[i].begin;
  }

  // Puts the bytes of stretch i in their places; past the page cache they go through a buffer of
  // kWindowNbytes.  IoError.
  void read(std::size_t i, BufferPool& buffers) const;

 private:
  // Ranges, or parts of them, that are read together: [begin, end) of one file.
  struct Stretch {
    std::size_t file = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t first_range = 0;
    std::size_t end_range = 0;
  };

  void check() const;
  void cut();
  std::uint64_t read_cached(const Stretch& stretch) const;
  bool read_direct(const Stretch& stretch, std::uint64_t begin, BufferPool& buffers) const;
  template <class Take>
  void for_each_piece(const Stretch& stretch, std::uint64_t begin, const Take& take) const;

  std::span<const ByteSource> files_;
  std::vector<FileRange> ranges_;
  std::vector<Stretch> stretches_;
};

}  // namespace ptsave
