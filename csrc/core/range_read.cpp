#include "core/range_read.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/error.h"
#include "core/stream_copy.h"

namespace ptsave {
namespace {

// A chunk lies within one such piece of its file, and so in a buffer.
constexpr std::uint64_t kWindowNbytes = kHugePageNbytes;
// Reading what nobody asked for is cheaper than one more call up to here.
constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{64} << 10;
// Below this all is read before a thread has started.
constexpr std::uint64_t kThreadedNbytes = std::uint64_t{1} << 20;

}  // namespace

RangeRead::RangeRead(std::vector<ArchiveSource> files, std::vector<FileRange> ranges)
    : files_(std::move(files)), ranges_(std::move(ranges)) {
  std::erase_if(ranges_, [](const FileRange& range) { return range.nbytes == 0; });
  std::ranges::sort(ranges_, {},
                    [](const FileRange& range) { return std::pair(range.file, range.offset); });
  check_ranges();
  cut();
}

void RangeRead::check_ranges() const {
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    const FileRange& range = ranges_[i];
    if (range.file >= files_.size()) throw std::invalid_argument("a range of no file");
    const std::uint64_t file_nbytes = files_[range.file].nbytes();
    if (range.offset > file_nbytes || range.nbytes > file_nbytes - range.offset) {
      throw IoError(0, "read (beyond the end)", files_[range.file].name());
    }
    if (i == 0 || ranges_[i - 1].file != range.file) continue;
    if (ranges_[i - 1].offset + ranges_[i - 1].nbytes > range.offset) {
      throw std::invalid_argument("ranges of a file overlap");
    }
  }
}

void RangeRead::cut() {
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    const FileRange& range = ranges_[i];
    const std::uint64_t range_end = range.offset + range.nbytes;
    for (std::uint64_t begin = range.offset; begin < range_end;) {
      const std::uint64_t window_end = align_down(begin, kWindowNbytes) + kWindowNbytes;
      const std::uint64_t end = std::min(range_end, window_end);
      const bool joins = !chunks_.empty() && chunks_.back().file == range.file &&
                         chunks_.back().end > window_end - kWindowNbytes &&
                         begin - chunks_.back().end <= kMaxGapNbytes;
      if (!joins) chunks_.push_back({range.file, begin, begin, i, i});
      chunks_.back().end = end;
      chunks_.back().end_range = i + 1;
      begin = end;
    }
  }
}

void RangeRead::run(std::size_t n_threads, const Poll& poll) {
  std::uint64_t nbytes = 0;
  for (const Chunk& chunk : chunks_) nbytes += chunk.end - chunk.begin;
  n_threads = nbytes < kThreadedNbytes ? 0 : std::min(n_threads, chunks_.size());
  buffers_ = std::make_unique<BufferPool>(std::max<std::size_t>(n_threads, 1), kWindowNbytes);
  ChunkPipeline pipeline(chunks_.size(), n_threads,
                         [this](ChunkPipeline&, std::size_t number) { read(chunks_[number]); });
  pipeline.finish(poll);
}

// What the page cache holds comes from there, straight into place; at the first gap the rest is
// read past it.
void RangeRead::read(const Chunk& chunk) {
  const ArchiveSource& file = files_[chunk.file];
  std::uint64_t at = chunk.begin;
  if (file.may_be_cached(chunk.begin, chunk.end - chunk.begin)) at = read_cached(chunk);
  if (at < chunk.end && !read_direct(chunk, at)) {
    for_each_piece(chunk, at, [&](std::uint64_t offset, std::byte* place, std::size_t nbytes) {
      file.read_at(offset, place, nbytes);
      return true;
    });
  }
  nbytes_read_.fetch_add(chunk.end - chunk.begin, std::memory_order_relaxed);
}

// Where the first byte that is not in place yet is.
std::uint64_t RangeRead::read_cached(const Chunk& chunk) const {
  std::uint64_t at = chunk.begin;
  for_each_piece(chunk, at, [&](std::uint64_t offset, std::byte* place, std::size_t nbytes) {
    const std::size_t n = files_[chunk.file].read_cached(offset, place, nbytes);
    at = offset + n;
    return n == nbytes;
  });
  return at;
}

// Through a buffer: direct reads take whole pages, and disks write faster into memory that is in
// use already.
bool RangeRead::read_direct(const Chunk& chunk, std::uint64_t begin) {
  const std::uint64_t buffer_begin = align_down(begin, kPageNbytes);
  const BufferPool::Lease buffer(*buffers_);
  const std::uint64_t nbytes_wanted = align_up(chunk.end, kPageNbytes) - buffer_begin;
  if (!files_[chunk.file].read_direct(buffer_begin, buffer.data(), nbytes_wanted)) return false;
  for_each_piece(chunk, begin, [&](std::uint64_t offset, std::byte* place, std::size_t nbytes) {
    stream_copy(place, buffer.data() + (offset - buffer_begin), nbytes);
    return true;
  });
  return true;
}

// Calls take(offset, place, nbytes) for what is in the chunk from `begin` on, until it returns
// false.
template <class Take>
void RangeRead::for_each_piece(const Chunk& chunk, std::uint64_t begin, const Take& take) const {
  for (std::size_t i = chunk.first_range; i < chunk.end_range; ++i) {
    const FileRange& range = ranges_[i];
    const std::uint64_t from = std::max(range.offset, begin);
    const std::uint64_t to = std::min(range.offset + range.nbytes, chunk.end);
    if (from >= to) continue;
    const auto nbytes = static_cast<std::size_t>(to - from);
    if (!take(from, range.place + (from - range.offset), nbytes)) return;
  }
}

}  // namespace ptsave
