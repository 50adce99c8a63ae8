// Reads parts of files into existing memory.  Whole blocks are read and checked against a table of
// checksums, before bytes are copied out of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/io/ranges.h"
#include "core/memory/buffer.h"
#include "core/memory/pages.h"
#include "core/pipeline/pipeline.h"

namespace ptsave {

// A block whose checksum differs.
struct DamagedBlock {
  std::size_t file = 0;
  std::uint64_t offset = 0;

  auto operator<=>(const DamagedBlock&) const = default;
};

// One read of many ranges into host memory.  Ranges of a file may overlap; shared bytes may then be
// read more than once.  Not safe for concurrent use, except nbytes_read().
class CheckedRead {
 public:
  // The checksums of a file's blocks; empty for a file that is not checked.
  using Table = std::span<const std::uint32_t>;

  // Ranges at most `max_gap` apart are read together.  Larger gaps are skipped, but reads take
  // whole blocks.  Places and tables must outlive this object.  Throws std::invalid_argument for a
  // bad file number, and IoError for a range beyond the end of its file or table.
  CheckedRead(std::shared_ptr<RangeFiles> files, std::vector<FileRange> ranges,
              std::vector<Table> tables, std::uint64_t max_gap)
      : files_(std::move(files)), ranges_(std::move(ranges)), tables_(std::move(tables)) {
    const auto position = [](const FileRange& range) {
      return std::pair(range.file, range.offset);
    };
    std::erase_if(ranges_, [](const FileRange& range) { return range.nbytes == 0; });
    if (!std::ranges::is_sorted(ranges_, {}, position)) std::ranges::sort(ranges_, {}, position);
    check();
    cut(max_gap);
  }

  // Returns when all bytes are in their places, except bytes that were read together with a damaged
  // block.  Returns the damaged blocks, sorted by file and offset.  Throws IoError.
  std::vector<DamagedBlock> run(std::size_t n_threads, const Poll& poll) {
    std::uint64_t nbytes = 0;
    for (const Stretch& stretch : stretches_) nbytes += stretch.end - stretch.begin;
    n_threads = nbytes < kThreadedNbytes ? 0 : std::min(n_threads, stretches_.size());
    run_chunks(stretches_.size(), n_threads, [&](std::size_t i) { read(stretches_[i]); }, poll);
    std::ranges::sort(damaged_);
    // Not std::ranges::unique: clang 14 does not compile the subrange of libstdc++ 12.
    damaged_.erase(std::unique(damaged_.begin(), damaged_.end()), damaged_.end());
    return damaged_;
  }

  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t kBlock = kCheckedBlockNbytes;
  static constexpr std::uint64_t kWindow = RangeList::kWindowNbytes;
  // Pieces of this size stay in the processor's cache until they are checked and copied.
  static constexpr std::uint64_t kCachedPieceNbytes = std::uint64_t{256} << 10;
  // A smaller copy is faster through the cache than past it.
  static constexpr std::uint64_t kMinStreamNbytes = std::uint64_t{16} << 10;

  using Stretch = RangeList::Stretch;  // of whole blocks

  void check() const {
    const auto files = files_->sources();
    if (tables_.size() != files.size()) throw std::invalid_argument("not one table per file");
    for (const FileRange& range : ranges_) {
      if (range.file >= files.size()) throw std::invalid_argument("a range of an unknown file");
      const ByteSource& file = files[range.file];
      std::uint64_t nbytes = file.nbytes();
      if (!tables_[range.file].empty()) {
        nbytes = std::min<std::uint64_t>(nbytes, tables_[range.file].size() * kBlock);
      }
      if (range.offset > nbytes || range.nbytes > nbytes - range.offset) {
        throw IoError(0, "read (beyond the end)", file.name());
      }
    }
  }

  void cut(std::uint64_t max_gap) {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      const FileRange& range = ranges_[i];
      const std::uint64_t range_end = std::min(align_up(range.offset + range.nbytes, kBlock),
                                               files_->sources()[range.file].nbytes());
      for (std::uint64_t begin = align_down(range.offset, kBlock); begin < range_end;) {
        const std::uint64_t window = align_down(begin, kWindow);
        const std::uint64_t end = std::min(range_end, window + kWindow);
        Stretch* last = stretches_.empty() ? nullptr : &stretches_.back();
        const bool joins = last != nullptr && last->file == range.file &&
                           align_down(last->begin, kWindow) == window && begin >= last->begin &&
                           begin <= last->end + max_gap;
        if (!joins) last = &stretches_.emplace_back(Stretch{range.file, begin, begin, i, i});
        last->end = std::max(last->end, end);
        last->end_range = i + 1;
        begin = end;
      }
    }
  }

  void read(const Stretch& stretch) {
    const BufferPool::Lease buffer(files_->buffers());
    const Stretch rest = read_cached(stretch, buffer.data());
    if (rest.begin < rest.end) {
      fetch(rest, buffer.data());
      deliver(rest, buffer.data());
    }
    nbytes_read_.fetch_add(stretch.end - stretch.begin, std::memory_order_relaxed);
  }
  // Delivers a stretch from the page cache up to the first missing byte; returns the rest.
  Stretch read_cached(Stretch rest, std::byte* buffer) {
    const ByteSource& file = files_->sources()[rest.file];
    if (!file.may_be_cached(rest.begin, rest.end - rest.begin)) return rest;
    while (rest.begin < rest.end) {
      Stretch piece = rest;
      piece.end = std::min(rest.end, rest.begin + kCachedPieceNbytes);
      const std::uint64_t nbytes = piece.end - piece.begin;
      if (file.read_cached(piece.begin, buffer, nbytes) < nbytes) break;
      deliver(piece, buffer);
      rest.begin = piece.end;
      const auto is_done = [&](const FileRange& range) {
        return range.offset + range.nbytes <= rest.begin;
      };
      while (rest.first_range < rest.end_range && is_done(ranges_[rest.first_range])) {
        ++rest.first_range;
      }
    }
    return rest;
  }

  // Reads a stretch from the disk.
  void fetch(const Stretch& stretch, std::byte* buffer) const {
    const ByteSource& file = files_->sources()[stretch.file];
    if (page_nbytes() <= kBlock) {
      const std::lock_guard slot(files_->slots());
      if (file.read_direct(stretch.begin, buffer, align_up(stretch.end - stretch.begin, kBlock))) {
        return;
      }
    }
    file.read_ahead(stretch.begin, stretch.end - stretch.begin);
    file.read_at(stretch.begin, buffer, stretch.end - stretch.begin);
  }

  void deliver(const Stretch& stretch, const std::byte* buffer) {
    if (is_whole(stretch, buffer)) copy_out(stretch, buffer);
  }
  bool is_whole(const Stretch& stretch, const std::byte* buffer) {
    const Table table = tables_[stretch.file];
    if (table.empty()) return true;
    bool whole = true;
    for (std::uint64_t at = stretch.begin; at < stretch.end; at += kBlock) {
      if (crc32(0, buffer + (at - stretch.begin), kBlock) == table[at / kBlock]) continue;
      whole = false;
      const std::lock_guard lock(mutex_);
      damaged_.push_back({stretch.file, at});
    }
    return whole;
  }

  void copy_out(const Stretch& stretch, const std::byte* buffer) const {
    for (std::size_t i = stretch.first_range; i < stretch.end_range; ++i) {
      const FileRange& range = ranges_[i];
      if (range.offset >= stretch.end) return;
      const std::uint64_t from = std::max(range.offset, stretch.begin);
      const std::uint64_t to = std::min(range.offset + range.nbytes, stretch.end);
      if (from >= to) continue;
      std::byte* const place = range.place + (from - range.offset);
      const std::byte* const data = buffer + (from - stretch.begin);
      if (to - from < kMinStreamNbytes) {
        std::memcpy(place, data, to - from);
      } else {
        stream_copy(place, data, to - from);
      }
    }
  }

  const std::shared_ptr<RangeFiles> files_;
  std::vector<FileRange> ranges_;
  const std::vector<Table> tables_;
  std::vector<Stretch> stretches_;
  std::mutex mutex_;
  std::vector<DamagedBlock> damaged_;
  std::atomic<std::uint64_t> nbytes_read_{0};
};

}  // namespace ptsave
