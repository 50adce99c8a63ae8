// Reads parts of files into existing memory, such as the tensors of a model's safetensors files.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/io/file.h"
#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"

namespace ptsave {

// A part of a file, and its destination: a place in host memory, or an Unstager's target.
struct FileRange {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
  std::optional<std::size_t> target = std::nullopt;
  std::optional<std::uint32_t> crc = std::nullopt;  // the expected one
};

// Small pieces of a file that follow each other.
class SmallPieces {
 public:
  bool takes(std::uint64_t offset, std::size_t nbytes) const {
    if (nbytes > kSmallNbytes) return false;
    return pieces_.empty() ||
           (offset - end_ <= kRunGapNbytes && offset + nbytes - begin_ <= kRunNbytes);
  }
  void add(std::uint64_t offset, std::byte* place, std::size_t nbytes) {
    if (pieces_.empty()) begin_ = offset;
    pieces_.push_back({offset, place, nbytes});
    end_ = offset + nbytes;
  }
  // Puts the pieces in their places, and forgets them. read(offset, data, nbytes) returns the
  // number of bytes read.  Moves `at` to the end of the bytes read; returns whether all bytes were
  // read.
  template <class Read>
  bool finish(const Read& read, std::uint64_t& at) {
    if (pieces_.empty()) return true;
    if (pieces_.size() == 1) {
      const Piece only = pieces_.front();
      pieces_.clear();
      at = only.offset + read(only.offset, only.place, only.nbytes);
      return at == end_;
    }
    if (!buffer_) buffer_ = std::make_unique_for_overwrite<std::byte[]>(kRunNbytes);
    at = begin_ + read(begin_, buffer_.get(), end_ - begin_);
    for (const auto& [offset, place, nbytes] : pieces_) {
      if (offset >= at) break;
      std::memcpy(place, buffer_.get() + (offset - begin_),
                  std::min<std::uint64_t>(nbytes, at - offset));
    }
    pieces_.clear();
    return at == end_;
  }

 private:
  // One call reads neighbouring pieces of up to this size into a buffer, from which they are
  // copied.  A call takes as long as a copy of some KiB, and a model may have 100,000 tensors.
  static constexpr std::size_t kSmallNbytes = std::size_t{8} << 10;
  static constexpr std::size_t kRunNbytes = std::size_t{64} << 10;
  static constexpr std::uint64_t kRunGapNbytes = std::uint64_t{1} << 10;
  struct Piece {
    std::uint64_t offset;
    std::byte* place;
    std::size_t nbytes;
  };
  std::vector<Piece> pieces_;
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
  std::unique_ptr<std::byte[]> buffer_;
};

// Ranges, sorted by file and offset, and divided into stretches that can be read independently.
// Safe for concurrent use.
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

  // Reading a gap of this size is cheaper than one more system call.
  static constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{64} << 10;

  // Throws std::invalid_argument for a range with a bad file number, and IoError for a range beyond
  // the end of its file.  `files` must outlive the list.  Ranges at most `max_gap` apart are read
  // together.  Larger gaps are skipped, but direct reads take whole blocks.
  // A stretch lies in a window of this size, at most kWindowNbytes.
  RangeList(std::span<const ByteSource> files, std::vector<FileRange> ranges,
            std::uint64_t max_gap = kMaxGapNbytes, std::uint64_t window_nbytes = kWindowNbytes)
      : files_(files), ranges_(std::move(ranges)), window_nbytes_(window_nbytes) {
    std::erase_if(ranges_, [](const FileRange& range) { return range.nbytes == 0; });
    std::ranges::sort(ranges_, {},
                      [](const FileRange& range) { return std::pair(range.file, range.offset); });
    check();
    cut(max_gap);
  }

  std::span<const FileRange> ranges() const { return ranges_; }
  std::size_t n_stretches() const { return stretches_.size(); }
  // Size of a stretch, gaps between ranges included.
  std::uint64_t stretch_nbytes(std::size_t i) const {
    return stretches_[i].end - stretches_[i].begin;
  }

  // The pieces of stretch i that go on to accelerators.  Their positions in the lease are relative
  // to the beginning of the stretch.
  std::vector<Unstager::Piece> pieces_to_send(std::size_t i) const {
    const Stretch& stretch = stretches_[i];
    std::vector<Unstager::Piece> pieces;
    for_each_part(stretch, stretch.begin,
                  [&](const FileRange& range, std::uint64_t from, std::uint64_t to) {
                    if (range.target) {
                      const std::uint64_t at = from - stretch.begin;
                      pieces.push_back({*range.target, from - range.offset, at, to - from});
                    }
                    return true;
                  });
    return pieces;
  }

  // The CRC of the part of a range in a stretch.
  struct PartCrc {
    std::size_t range;
    std::uint64_t nbytes;
    std::uint32_t crc;
  };
  // The CRCs of stretch i, for ranges with an expected one; `lease` is that of read().
  std::vector<PartCrc> crcs(std::size_t i, const std::byte* lease) const {
    const Stretch& stretch = stretches_[i];
    std::vector<PartCrc> found;
    for_each_part(
        stretch, stretch.begin, [&](const FileRange& range, std::uint64_t from, std::uint64_t to) {
          if (!range.crc) return true;
          const std::byte* const data =
              range.target ? lease + (from - stretch.begin) : range.place + (from - range.offset);
          found.push_back({static_cast<std::size_t>(&range - ranges_.data()), to - from,
                           crc32(0, data, to - from)});
          return true;
        });
    return found;
  }

  // Puts the bytes of stretch i in their places, and the bytes for accelerators into `lease`.
  // Reads past the page cache wait for a slot and use a buffer of kWindowNbytes.  Throws IoError.
  // Reads from the page cache up to the first missing byte, and the rest from the disk.
  void read(std::size_t i, BufferPool& buffers, std::byte* lease = nullptr,
            ReadSlots* slots = nullptr) const {
    const Stretch& stretch = stretches_[i];
    const ByteSource& file = files_[stretch.file];
    std::uint64_t at = stretch.begin;
    if (file.may_be_cached(at, stretch.end - at)) at = read_cached(stretch, lease);
    if (at < stretch.end && !read_direct(stretch, at, buffers, lease, slots)) {
      file.read_ahead(at, stretch.end - at);
      read_pieces(stretch, at, lease,
                  [&](std::uint64_t offset, std::byte* place, std::size_t nbytes) {
                    file.read_at(offset, place, nbytes);
                    return nbytes;
                  });
    }
  }

 private:
  void check() const {
    for (const FileRange& range : ranges_) {
      if (range.file >= files_.size()) throw std::invalid_argument("a range of an unknown file");
      const std::uint64_t file_nbytes = files_[range.file].nbytes();
      if (range.offset > file_nbytes || range.nbytes > file_nbytes - range.offset) {
        throw IoError(0, "read (beyond the end)", files_[range.file].name());
      }
    }
  }
  void cut(std::uint64_t max_gap) {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      const FileRange& range = ranges_[i];
      const std::uint64_t range_end = range.offset + range.nbytes;
      for (std::uint64_t begin = range.offset; begin < range_end;) {
        const std::uint64_t window_end = align_down(begin, window_nbytes_) + window_nbytes_;
        const std::uint64_t end = std::min(range_end, window_end);
        const bool joins = !stretches_.empty() && stretches_.back().file == range.file &&
                           stretches_.back().end > window_end - window_nbytes_ &&
                           stretches_.back().end <= begin &&
                           begin - stretches_.back().end <= max_gap;
        if (!joins) stretches_.push_back({range.file, begin, begin, i, i});
        stretches_.back().end = end;
        stretches_.back().end_range = i + 1;
        begin = end;
      }
    }
  }

  // Returns the offset of the first byte that is not in place yet.
  std::uint64_t read_cached(const Stretch& stretch, std::byte* lease) const {
    const ByteSource& file = files_[stretch.file];
    return read_pieces(stretch, stretch.begin, lease,
                       [&](std::uint64_t offset, std::byte* place, std::size_t nbytes) {
                         return file.read_cached(offset, place, nbytes);
                       });
  }
  // Puts the pieces of a stretch from `begin` on in their places with read(offset, data, nbytes),
  // until a read falls short.  Returns the offset of the first byte that is not in place.
  template <class Read>
  std::uint64_t read_pieces(const Stretch& stretch, std::uint64_t begin, std::byte* lease,
                            const Read& read) const {
    // For a source in memory, the gaps between pieces may not be readable.
    const bool is_file = files_[stretch.file].memory() == nullptr;
    std::uint64_t at = begin;
    SmallPieces run;
    bool goes_on = true;
    for_each_piece(stretch, begin, lease,
                   [&](std::uint64_t offset, std::byte* place, std::size_t nbytes) {
                     const bool joins = is_file && run.takes(offset, nbytes);
                     if (!joins) goes_on = run.finish(read, at);
                     if (!goes_on) return false;
                     if (is_file && run.takes(offset, nbytes)) {
                       run.add(offset, place, nbytes);
                       return true;
                     }
                     const std::size_t n = read(offset, place, nbytes);
                     at = offset + n;
                     goes_on = n == nbytes;
                     return goes_on;
                   });
    if (goes_on) run.finish(read, at);
    return at;
  }

  // Reads through a buffer, because direct reads take whole blocks, and disks write faster into
  // memory that is in use already.
  bool read_direct(const Stretch& stretch, std::uint64_t begin, BufferPool& buffers,
                   std::byte* lease, ReadSlots* slots) const {
    const std::size_t block = files_[stretch.file].block_nbytes();
    const std::uint64_t buffer_begin = align_down(begin, block);
    const BufferPool::Lease buffer(buffers);
    const std::uint64_t nbytes_wanted = align_up(stretch.end, block) - buffer_begin;
    const bool was_read = [&] {
      std::unique_lock<ReadSlots> slot;
      if (slots != nullptr) slot = std::unique_lock(*slots);
      return files_[stretch.file].read_direct(buffer_begin, buffer.data(), nbytes_wanted);
    }();
    if (!was_read) return false;
    for_each_piece(stretch, begin, lease,
                   [&](std::uint64_t offset, std::byte* place, std::size_t nbytes) {
                     stream_copy(place, buffer.data() + (offset - buffer_begin), nbytes);
                     return true;
                   });
    return true;
  }

  // Calls take(range, from, to) for the parts of ranges that lie in the stretch from `begin` on,
  // until `take` returns false.
  template <class Take>
  void for_each_part(const Stretch& stretch, std::uint64_t begin, const Take& take) const {
    for (std::size_t i = stretch.first_range; i < stretch.end_range; ++i) {
      const FileRange& range = ranges_[i];
      const std::uint64_t from = std::max(range.offset, begin);
      const std::uint64_t to = std::min(range.offset + range.nbytes, stretch.end);
      if (from < to && !take(range, from, to)) return;
    }
  }
  // Calls take(offset, place, nbytes) for the same parts.
  template <class Take>
  void for_each_piece(const Stretch& stretch, std::uint64_t begin, std::byte* lease,
                      const Take& take) const {
    for_each_part(
        stretch, begin, [&](const FileRange& range, std::uint64_t from, std::uint64_t to) {
          std::byte* const place =
              range.target ? lease + (from - stretch.begin) : range.place + (from - range.offset);
          return take(from, place, static_cast<std::size_t>(to - from));
        });
  }

  std::span<const ByteSource> files_;
  std::vector<FileRange> ranges_;
  const std::uint64_t window_nbytes_;
  std::vector<Stretch> stretches_;
};

// The CRCs of ranges of a file, (offset, nbytes) each.  Throws IoError.
inline std::vector<std::uint32_t> crcs_of_ranges(
    const File& file, std::span<const std::pair<std::uint64_t, std::uint64_t>> ranges,
    std::size_t n_threads, const Poll& poll) {
  constexpr std::uint64_t kPieceNbytes = std::uint64_t{1} << 20;  // stays in the processor's cache
  constexpr std::size_t kMinPieces = 4;  // of a thread; fewer take less time than its start
  struct Piece {
    std::size_t range;
    std::uint64_t offset;
    std::size_t nbytes;
    std::uint32_t crc = 0;
  };
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    for (std::uint64_t done = 0; done < ranges[i].second; done += kPieceNbytes) {
      const std::uint64_t nbytes = std::min(kPieceNbytes, ranges[i].second - done);
      pieces.push_back({i, ranges[i].first + done, static_cast<std::size_t>(nbytes)});
    }
  }
  n_threads = std::min(n_threads, pieces.size() / kMinPieces);
  BufferPool buffers(std::max<std::size_t>(n_threads, 1), kPieceNbytes);
  const auto compute = [&](std::size_t i) {
    const BufferPool::Lease buffer(buffers);
    Piece& piece = pieces[i];
    file.read_at(piece.offset, buffer.data(), piece.nbytes);
    piece.crc = crc32(0, buffer.data(), piece.nbytes);
  };
  run_chunks(pieces.size(), n_threads, compute, poll);
  std::vector<std::uint32_t> crcs(ranges.size());
  for (const Piece& piece : pieces) {
    crcs[piece.range] = crc32_combine(crcs[piece.range], piece.crc, piece.nbytes);
  }
  return crcs;
}

// Files, and the buffers for reads past the page cache.  The buffers are made once, because fresh
// memory costs more than copying out of a buffer.  Safe for concurrent use.
class RangeFiles {
 public:
  // Announces this reader to other readers (CoReaders).  Direct reads fill at most half of the
  // buffers at a time.
  explicit RangeFiles(std::vector<ByteSource> sources, std::size_t n_buffers = 1)
      : owned_(std::move(sources)),
        sources_(owned_),
        buffers_(std::max<std::size_t>(n_buffers, 1), RangeList::kWindowNbytes, Count::kUpTo),
        slots_(n_buffers) {
    for (const ByteSource& source : sources_) source.announce();
  }
  // Borrows sources that outlive this object.
  explicit RangeFiles(std::span<const ByteSource> sources, std::size_t n_buffers = 1)
      : sources_(sources),
        buffers_(std::max<std::size_t>(n_buffers, 1), RangeList::kWindowNbytes, Count::kUpTo),
        slots_(n_buffers) {}

  std::span<const ByteSource> sources() const { return sources_; }
  BufferPool& buffers() { return buffers_; }
  ReadSlots& slots() { return slots_; }

 private:
  const std::vector<ByteSource> owned_;
  const std::span<const ByteSource> sources_;
  BufferPool buffers_;
  ReadSlots slots_;
};

inline void refuse_overlaps(std::span<const FileRange> ranges) {
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    const FileRange& before = ranges[i - 1];
    if (before.file == ranges[i].file && before.offset + before.nbytes > ranges[i].offset) {
      throw std::invalid_argument("ranges of a file overlap");
    }
  }
}

// One read of many ranges, whose memory must outlive it.  Not safe for concurrent use, except
// nbytes_read().
class RangeRead {
 public:
  static constexpr std::size_t kLeaseNbytes = RangeList::kWindowNbytes;

  // Throws std::invalid_argument for a bad file number or for ranges that overlap in a file, and
  // IoError for a range beyond the end of its file.  Places must not overlap (unchecked).
  RangeRead(std::shared_ptr<RangeFiles> files, std::vector<FileRange> ranges,
            std::uint64_t max_gap = RangeList::kMaxGapNbytes)
      : files_(std::move(files)),
        is_checked_(std::ranges::any_of(ranges, has_crc)),
        is_sent_(std::ranges::any_of(ranges, has_target)),
        ranges_(files_->sources(), std::move(ranges), max_gap, window_nbytes()) {
    refuse_overlaps(ranges_.ranges());
    if (is_checked_) crcs_.resize(ranges_.n_stretches());
  }

  // Returns when all bytes are in their places.  Ranges with targets need an `unstager`; each
  // thread holds a lease of at most kLeaseNbytes.  Throws IoError; copies may then still be in
  // flight.
  void run(std::size_t n_threads, const Poll& poll, Unstager* unstager = nullptr) {
    std::uint64_t nbytes = 0;
    for (std::size_t i = 0; i < ranges_.n_stretches(); ++i) nbytes += ranges_.stretch_nbytes(i);
    n_threads = nbytes < kThreadedNbytes ? 0 : std::min(n_threads, ranges_.n_stretches());
    const auto read_stretch = [&](std::size_t i) {
      read(i, unstager);
      nbytes_read_.fetch_add(ranges_.stretch_nbytes(i), std::memory_order_relaxed);
    };
    run_chunks(ranges_.n_stretches(), n_threads, read_stretch, poll);
    if (unstager != nullptr) unstager->drain();
  }

  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

  // The ranges that do not have their expected CRCs; call after run().
  std::vector<FileRange> damaged() const {
    std::vector<std::uint32_t> crcs(crcs_.empty() ? 0 : ranges_.ranges().size());
    for (const std::vector<RangeList::PartCrc>& stretch : crcs_) {
      for (const auto& [range, nbytes, crc] : stretch) {
        crcs[range] = crc32_combine(crcs[range], crc, nbytes);
      }
    }
    std::vector<FileRange> damaged;
    for (std::size_t i = 0; i < crcs.size(); ++i) {
      const FileRange& range = ranges_.ranges()[i];
      if (range.crc && *range.crc != crcs[i]) damaged.push_back(range);
    }
    return damaged;
  }

 private:
  void read(std::size_t stretch, Unstager* unstager) {
    BufferPool& buffers = files_->buffers();
    ReadSlots& slots = files_->slots();
    std::vector<Unstager::Piece> pieces;
    if (unstager != nullptr) pieces = ranges_.pieces_to_send(stretch);
    std::unique_ptr<Lease> lease;
    if (!pieces.empty()) lease = unstager->lease(ranges_.stretch_nbytes(stretch));
    std::byte* const data = lease != nullptr ? lease->data() : nullptr;
    ranges_.read(stretch, buffers, data, &slots);
    if (!crcs_.empty()) crcs_[stretch] = ranges_.crcs(stretch, data);
    if (lease != nullptr) unstager->send(std::move(lease), pieces);
  }

  static bool has_crc(const FileRange& range) { return range.crc.has_value(); }
  static bool has_target(const FileRange& range) { return range.target.has_value(); }

  // Bytes that were copied from the page cache stay in the processor's cache for the checksum, if
  // they are few.  Disks and accelerators are faster with more bytes at a time.
  std::uint64_t window_nbytes() const {
    const auto is_cached = [](const ByteSource& file) { return file.may_be_cached(0, 1); };
    const bool is_small =
        is_checked_ && !is_sent_ && std::ranges::all_of(files_->sources(), is_cached);
    return is_small ? kCheckedNbytes : RangeList::kWindowNbytes;
  }

  static constexpr std::uint64_t kCheckedNbytes = std::uint64_t{512} << 10;

  const std::shared_ptr<RangeFiles> files_;
  const bool is_checked_;
  const bool is_sent_;
  const RangeList ranges_;
  std::vector<std::vector<RangeList::PartCrc>> crcs_;  // by stretch; empty if none is compared
  std::atomic<std::uint64_t> nbytes_read_{0};
};

}  // namespace ptsave
