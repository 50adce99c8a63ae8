// Reads parts of files into existing memory: the tensors of all of a model's files, in a format
// such as safetensors that is a header and bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"

namespace ptsave {

// A part of a file and the memory it belongs in: a place on the host, or an Unstager's target.
struct FileRange {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
  std::optional<std::size_t> target = std::nullopt;
};

// Ranges in the order of files and offsets, in independent stretches.  Safe for concurrent use.
class RangeList {
 public:
  // Whole ranges or parts that are read together: [begin, end) of one file.
  struct Stretch {
    std::size_t file = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t first_range = 0;
    std::size_t end_range = 0;
  };

  // Size of the file window that holds a stretch, and of the buffer for reading it.
  static constexpr std::size_t kWindowNbytes = kHugePageNbytes;

  // Reading a gap of this size is cheaper than one more call.
  static constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{64} << 10;

  // Throws std::invalid_argument for a range with a bad file number, and IoError for a range beyond
  // the end of its file.  `files` must outlive the list.  Ranges at most `max_gap` apart are read
  // together; larger gaps are skipped, up to whole blocks.
  RangeList(std::span<const ByteSource> files, std::vector<FileRange> ranges,
            std::uint64_t max_gap = kMaxGapNbytes);

  std::span<const FileRange> ranges() const { return ranges_; }
  std::size_t n_stretches() const { return stretches_.size(); }
  // Size of a stretch, gaps between ranges included.
  std::uint64_t stretch_nbytes(std::size_t i) const {
    return stretches_[i].end - stretches_[i].begin;
  }

  // The pieces of stretch i that go on to accelerators.  Their positions in the lease are relative
  // to the beginning of the stretch.
  std::vector<Unstager::Piece> pieces_to_send(std::size_t i) const;

  // Puts the bytes of stretch i in their places, and the bytes for accelerators into `lease`.
  // Reads past the page cache wait for a slot and use a buffer of kWindowNbytes.  Throws IoError.
  void read(std::size_t i, BufferPool& buffers, std::byte* lease = nullptr,
            ReadSlots* slots = nullptr) const;

 private:
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

// Files, and the buffers for reads past the page cache.  The buffers are made once, because fresh
// memory costs more than the copy out of it.  Safe for concurrent use.
class RangeFiles {
 public:
  // Announces this reader.  At most half as many direct reads as buffers run at a time.
  explicit RangeFiles(std::vector<ByteSource> sources, std::size_t n_buffers = 1);
  // Borrows sources that outlive this object.
  explicit RangeFiles(std::span<const ByteSource> sources, std::size_t n_buffers = 1);

  std::span<const ByteSource> sources() const { return sources_; }
  BufferPool& buffers() { return buffers_; }
  ReadSlots& slots() { return slots_; }

 private:
  const std::vector<ByteSource> owned_;
  const std::span<const ByteSource> sources_;
  BufferPool buffers_;
  ReadSlots slots_;
};

// One read of many ranges, whose memory must outlive it.  Not safe for concurrent use, except
// nbytes_read().
class RangeRead {
 public:
  static constexpr std::size_t kLeaseNbytes = RangeList::kWindowNbytes;

  // Throws std::invalid_argument for a bad file number or for ranges that overlap in a file, and
  // IoError for a range beyond the end of its file.  Places must not overlap (unchecked).
  RangeRead(std::shared_ptr<RangeFiles> files, std::vector<FileRange> ranges,
            std::uint64_t max_gap = RangeList::kMaxGapNbytes);

  // Returns when all bytes are in their places.  Ranges with targets need an `unstager`; each
  // thread holds a lease of at most kLeaseNbytes.  Throws IoError; copies may then still be in
  // flight.
  void run(std::size_t n_threads, const Poll& poll, Unstager* unstager = nullptr);
  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

 private:
  void read(std::size_t stretch, Unstager* unstager) const;

  const std::shared_ptr<RangeFiles> files_;
  const RangeList ranges_;
  std::atomic<std::uint64_t> nbytes_read_{0};
};

}  // namespace ptsave
