// Parts of files and the memory they belong in, cut into stretches that are read together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/io/read_slots.h"
#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/stager.h"

namespace ptsave {

// A part of a file and the memory it belongs in: a place on the host, or the target of this number
// that an Unstager has.
struct FileRange {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
  std::optional<std::size_t> target = std::nullopt;
};

// Ranges in the order of files and offsets.  Safe for concurrent use: each stretch is read by
// itself.
class RangeList {
 public:
  // Size of the window of a file in which a stretch lies, and of a buffer through which it is read.
  static constexpr std::size_t kWindowNbytes = kHugePageNbytes;

  // Reading a gap of this size is cheaper than one more call.
  static constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{64} << 10;

  // std::invalid_argument for a range of no file; IoError for one beyond the end of its file.
  // `files` must outlive the list.  Of more bytes than `max_gap` that nobody wants none is read,
  // but for the rest of a block.
  RangeList(std::span<const ByteSource> files, std::vector<FileRange> ranges,
            std::uint64_t max_gap = kMaxGapNbytes);

  std::span<const FileRange> ranges() const { return ranges_; }
  std::size_t n_stretches() const { return stretches_.size(); }
  // Size of a stretch, gaps between ranges included.
  std::uint64_t stretch_nbytes(std::size_t i) const {
    return stretches_[i].end - stretches_[i].begin;
  }

  // The bytes of stretch i that go on to accelerators, each as far from the beginning of a lease as
  // it is from that of the stretch.
  std::vector<Unstager::Piece> pieces_to_send(std::size_t i) const;

  // Puts the bytes of stretch i in their places, those that go on into `lease`; past the page cache
  // they go through a buffer of kWindowNbytes, when there is a slot.  IoError.
  void read(std::size_t i, BufferPool& buffers, std::byte* lease = nullptr,
            ReadSlots* slots = nullptr) const;

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
  void cut(std::uint64_t max_gap);
  std::uint64_t read_cached(const Stretch& stretch, std::byte* lease) const;
  template <class Read>
  std::uint64_t read_pieces(const Stretch& stretch, std::uint64_t begin, std::byte* lease,
                            const Read& read) const;
  bool read_direct(const Stretch& stretch, std::uint64_t begin, BufferPool& buffers,
                   std::byte* lease, ReadSlots* slots) const;
  template <class Take>
  void for_each_part(const Stretch& stretch, std::uint64_t begin, const Take& take) const;
  template <class Take>
  void for_each_piece(const Stretch& stretch, std::uint64_t begin, std::byte* lease,
                      const Take& take) const;

  std::span<const ByteSource> files_;
  std::vector<FileRange> ranges_;
  std::vector<Stretch> stretches_;
};

}  // namespace ptsave
