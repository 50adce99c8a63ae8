#include "core/write/writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/memory/pages.h"
#include "core/write/sharing.h"

namespace ptsave {
namespace {

// Bytes are gathered up to this size and written while the processor's cache still holds them.
// With smaller writes, threads that write to one file wait for each other more often.
constexpr std::size_t kGatheredNbytes = std::size_t{1} << 20;
// Bytes are copied and checksummed in pieces of this size, which stay in the first-level cache.
constexpr std::size_t kCheckedNbytes = std::size_t{16} << 10;
// Payload pieces of at least this size may be written from their own memory.
constexpr std::size_t kMinUngatheredNbytes = std::size_t{64} << 10;

// Copies a piece of a payload; with compute_crcs, returns the CRC continued over it.
std::uint32_t copy_payload(std::byte* out, const std::byte* data, std::size_t nbytes,
                           std::uint32_t crc, bool compute_crcs) {
  if (compute_crcs) return crc32_copy(crc, out, data, nbytes);
  std::memcpy(out, data, nbytes);
  return crc;
}

// Copies a chunk into memory.
class MemoryChunk final : public ChunkSink {
 public:
  MemoryChunk(std::byte* out, bool compute_crcs) : out_(out), compute_crcs_(compute_crcs) {}

  std::uint32_t put_payload(const std::byte* data, std::size_t nbytes, std::uint32_t crc) override {
    return copy_payload(std::exchange(out_, out_ + nbytes), data, nbytes, crc, compute_crcs_);
  }
  void put_seam(const std::byte* data, std::size_t nbytes) override {
    std::memcpy(out_, data, nbytes);
    out_ += nbytes;
  }
  void put_hole(std::uint64_t nbytes) override {
    std::memset(out_, 0, nbytes);
    out_ += nbytes;
  }

 private:
  std::byte* out_;
  bool compute_crcs_;
};

// Gathers a chunk in a buffer that mirrors the file, except blocks that the device can read from a
// payload's own memory.
class BlockChunk final : public ChunkSink {
 public:
  // `offset`, the chunk's position in the file, begins a block.
  BlockChunk(std::byte* buffer, std::uint64_t offset, const DirectIoAlignment& alignment,
             bool compute_crcs)
      : buffer_(buffer),
        begin_(offset),
        at_(offset),
        alignment_(alignment),
        compute_crcs_(compute_crcs) {}

  std::uint32_t put_payload(const std::byte* data, std::size_t nbytes, std::uint32_t crc) override {
    const std::uint64_t first = align_up(at_, alignment_.block_nbytes());
    const std::uint64_t last = align_down(at_ + nbytes, alignment_.block_nbytes());
    const std::byte* const blocks = data + (first - at_);
    if (last < first + kMinUngatheredNbytes || !alignment_.takes_from(blocks)) {
      return gather_payload(data, nbytes, crc);
    }
    const std::byte* const rest = blocks + (last - first);
    crc = gather_payload(data, first - at_, crc);
    if (compute_crcs_) crc = crc32(crc, blocks, last - first);
    add(const_cast<std::byte*>(blocks), last - first);
    return gather_payload(rest, nbytes - static_cast<std::size_t>(rest - data), crc);
  }
  void put_seam(const std::byte* data, std::size_t nbytes) override {
    if (nbytes == 0) return;
    std::memcpy(mirror(), data, nbytes);
    add(mirror(), nbytes);
  }
  void put_hole(std::uint64_t nbytes) override {
    std::memset(mirror(), 0, nbytes);
    add(mirror(), nbytes);
  }
  // The chunk's first `nbytes` bytes; the bytes behind them are in the buffer.
  std::vector<iovec> pieces(std::size_t nbytes) {
    std::vector<iovec> pieces;
    for (iovec piece : pieces_) {
      piece.iov_len = std::min(piece.iov_len, nbytes);
      if (piece.iov_len > 0) pieces.push_back(piece);
      nbytes -= piece.iov_len;
    }
    return pieces;
  }

 private:
  std::byte* mirror() const { return buffer_ + (at_ - begin_); }
  std::uint32_t gather_payload(const std::byte* data, std::size_t nbytes, std::uint32_t crc) {
    if (nbytes == 0) return crc;
    crc = copy_payload(mirror(), data, nbytes, crc, compute_crcs_);
    add(mirror(), nbytes);
    return crc;
  }
  void add(std::byte* data, std::size_t nbytes) {
    at_ += nbytes;
    if (!pieces_.empty()) {
      iovec& last = pieces_.back();
      if (static_cast<std::byte*>(last.iov_base) + last.iov_len == data) {
        last.iov_len += nbytes;
        return;
      }
    }
    pieces_.push_back({data, nbytes});
  }

  std::byte* const buffer_;
  const std::uint64_t begin_;
  std::uint64_t at_;
  const DirectIoAlignment alignment_;
  const bool compute_crcs_;
  std::vector<iovec> pieces_;
};

void write_through_cache(const File& file, std::uint64_t offset, const std::byte* data,
                         std::uint64_t nbytes) {
  for (std::uint64_t done = 0; done < nbytes; done += kCacheWriteNbytes) {
    file.write_at(offset + done, data + done,
                  std::min<std::uint64_t>(nbytes - done, kCacheWriteNbytes));
  }
}

// Whether payloads are gathered even without a checksum.  Threads that write to one file wait for
// each other while the kernel copies, and the kernel copies faster from the processor's cache than
// from memory.  A single thread would only copy the bytes twice.
enum class Gather : std::uint8_t { kAll, kWhatNeedsIt };

// Passes a chunk on in large pieces through a buffer.  The checksum is computed from the copy, so
// it is right even if another thread changes the payload meanwhile.
class GatheringChunk final : public ChunkSink {
 public:
  GatheringChunk(const StreamSink& sink, bool compute_crcs, Gather gather,
                 std::span<std::byte> buffer)
      : sink_(sink),
        compute_crcs_(compute_crcs),
        takes_payloads_(!compute_crcs && gather == Gather::kWhatNeedsIt),
        buffer_(buffer) {}

  std::uint32_t put_payload(const std::byte* data, std::size_t nbytes, std::uint32_t crc) override {
    if (takes_payloads_ && nbytes >= kMinUngatheredNbytes) {
      flush();
      for (std::size_t done = 0; done < nbytes; done += kGatheredNbytes) {
        sink_(data + done, std::min(nbytes - done, kGatheredNbytes));
      }
      return crc;
    }
    gather(data, nbytes, [&](const std::byte* copy, std::size_t n) {
      if (compute_crcs_) crc = crc32(crc, copy, n);
    });
    return crc;
  }
  void put_seam(const std::byte* data, std::size_t nbytes) override {
    gather(data, nbytes, [](const std::byte* /*copy*/, std::size_t /*n*/) {});
  }
  void put_hole(std::uint64_t nbytes) override {
    flush();
    sink_(nullptr, nbytes);
  }
  void flush() {
    if (n_gathered_ > 0) sink_(buffer_.data(), n_gathered_);
    n_gathered_ = 0;
  }

 private:
  template <typename Check>
  void gather(const std::byte* data, std::size_t nbytes, Check check) {
    while (nbytes > 0) {
      const std::size_t n = std::min({nbytes, buffer_.size() - n_gathered_, kCheckedNbytes});
      std::byte* const copy = buffer_.data() + n_gathered_;
      std::memcpy(copy, data, n);
      check(copy, n);
      n_gathered_ += n;
      if (n_gathered_ == buffer_.size()) flush();
      data += n;
      nbytes -= n;
    }
  }

  const StreamSink& sink_;
  const bool compute_crcs_;
  const bool takes_payloads_;
  const std::span<std::byte> buffer_;
  std::size_t n_gathered_ = 0;
};

// The buffer size for a body's GatheringChunks.
std::size_t gathered_nbytes(const FileBody& body) {
  const std::uint64_t nbytes = std::min<std::uint64_t>(body.nbytes(), body.chunk_nbytes());
  return std::clamp<std::uint64_t>(nbytes, 1, kGatheredNbytes);
}

// Writes a chunk through the page cache.
void write_cached(FileBody& body, ChunkPipeline& pipeline, std::size_t i, File& file,
                  std::uint64_t base_offset, bool compute_crcs, Gather gather, std::byte* buffer,
                  MemoryGauge& gauge) {
  std::uint64_t offset = base_offset + body.chunk_range(i).begin;
  const StreamSink sink = [&](const std::byte* data, std::uint64_t nbytes) {
    if (data != nullptr) {
      const auto begin = thread_cpu_time();
      write_through_cache(file, offset, data, nbytes);
      gauge.note(nbytes, thread_cpu_time() - begin);
    }
    offset += nbytes;
  };
  GatheringChunk chunk(sink, compute_crcs, gather, {buffer, gathered_nbytes(body)});
  body.produce(pipeline, i, chunk);
  chunk.flush();
}

// Writes chunks past the page cache, through an open file of its own.  Safe for concurrent use.
class DirectWriter {
 public:
  DirectWriter(FileBody& body, const File& file, std::uint64_t base_offset,
               const WriteOptions& options, std::size_t n_buffers)
      : body_(body),
        file_(file),
        base_offset_(base_offset),
        options_(options),
        n_buffers_(n_buffers),
        alignment_(options.direct_nbytes ? file.direct_io_alignment() : DirectIoAlignment{}),
        // Only whole blocks can be written directly; the rest of the body is written with the tail.
        aligned_end_(align_down(body.nbytes(), alignment_.block_nbytes())),
        direct_(alignment_.supported() ? file.open_direct_writer() : Descriptor(), file.path()),
        is_possible_(direct_.fd() >= 0) {}

  // False if the file system has no direct writes or has refused one, or if memory is short.
  bool is_possible() const { return is_possible_.load(std::memory_order_relaxed); }

  // Must be called before the first write(); false if memory is short.
  bool take_buffers() {
    try {
      buffers_ = &(options_.buffers != nullptr ? *options_.buffers : own_)
                      .take(n_buffers_, body_.chunk_nbytes());
    } catch (const std::bad_alloc&) {
      is_possible_.store(false, std::memory_order_relaxed);
    }
    return buffers_ != nullptr;
  }

  void write(ChunkPipeline& pipeline, std::size_t i) {
    const ByteRange range = body_.chunk_range(i);
    const BufferPool::Lease buffer(*buffers_);
    const std::uint64_t offset = base_offset_ + range.begin;
    const std::size_t nbytes = std::min(range.end, aligned_end_) - range.begin;
    if (options_.sharing != nullptr) {
      Sharing::Chunk chunk(*options_.sharing, file_, range, buffer.data());
      body_.produce(pipeline, i, chunk);
      for (const Sharing::Chunk::Part& part : chunk.finish()) write_part(part);
      return;
    }
    std::function<void(const File&)> write;
    // Staged bytes are freed when the chunk has been produced.
    const bool comes_later = options_.stager != nullptr || options_.arriving != nullptr;
    if (options_.payloads_are_still && !comes_later) {
      BlockChunk chunk(buffer.data(), offset, alignment_, options_.compute_crcs);
      body_.produce(pipeline, i, chunk);
      write = [offset, pieces = chunk.pieces(nbytes)](const File& file) {
        file.write_pieces_at(offset, pieces);
      };
    } else {
      MemoryChunk chunk(buffer.data(), options_.compute_crcs);
      body_.produce(pipeline, i, chunk);
      write = [&](const File& file) { file.write_at(offset, buffer.data(), nbytes); };
    }
    if (range.end > aligned_end_) {
      rest_.assign(reinterpret_cast<const char*>(buffer.data()) + nbytes, range.nbytes() - nbytes);
    }
    if (nbytes > 0) write_aligned(write);
  }

  // The bytes behind the body's last whole block, if write() has seen them.
  const std::string& rest() const { return rest_; }

 private:
  void write_part(const Sharing::Chunk::Part& part) {
    const std::uint64_t begin = part.range.begin;
    const std::uint64_t end = part.range.end;
    std::uint64_t middle = begin;
    if (begin < options_.direct_nbytes.value_or(0) && is_possible()) {
      middle = std::clamp(aligned_end_, begin, end);
    }
    if (begin < middle) {
      write_aligned([&](const File& file) { file.write_at(begin, part.data, middle - begin); });
    }
    write_through_cache(file_, middle, part.data + (middle - begin), end - middle);
  }

  // If the kernel refuses promised direct I/O (EINVAL), the rest goes through the page cache.
  void write_aligned(const std::function<void(const File&)>& write) {
    try {
      write(direct_);
    } catch (const IoError& error) {
      if (error.errnum() != EINVAL) throw;
      is_possible_.store(false, std::memory_order_relaxed);
      write(file_);
    }
  }

  FileBody& body_;
  const File& file_;
  const std::uint64_t base_offset_;
  const WriteOptions& options_;
  const std::size_t n_buffers_;
  const DirectIoAlignment alignment_;
  const std::uint64_t aligned_end_;
  const File direct_;
  std::atomic<bool> is_possible_;
  std::string rest_;
  DirectBuffers own_;
  BufferPool* buffers_ = nullptr;
};

// Runs `write_chunk` over the body's chunks, without threads for a single chunk.
void run_body(FileBody& body, std::size_t n_threads, Priority priority, Progress& progress,
              const Poll& poll, const ChunkPipeline::Work& write_chunk) {
  const auto work = [&](ChunkPipeline& self, std::size_t chunk) {
    write_chunk(self, chunk);
    progress.fetch_add(body.chunk_range(chunk).nbytes(), std::memory_order_relaxed);
  };
  ChunkPipeline pipeline(body.n_chunks(), body.n_chunks() > 1 ? n_threads : 0, work, priority);
  body.prepare_tail();
  pipeline.finish(poll);
}

std::string checked_tail(FileBody& body, const WriteOptions& options) {
  std::string tail = body.tail();
  if (options.check_crcs) options.check_crcs(body.crcs());
  return tail;
}

// Copies the first `nbytes` bytes of a file to the beginning of another.
void copy_file(const File& from, File& to, std::uint64_t nbytes, const Poll& poll) {
  constexpr std::uint64_t kPieceNbytes = 4 << 20;
  std::vector<std::byte> piece(std::min(nbytes, kPieceNbytes));
  for (std::uint64_t offset = 0; offset < nbytes; offset += piece.size()) {
    poll();
    const std::size_t n = std::min<std::uint64_t>(piece.size(), nbytes - offset);
    from.read_at(offset, piece.data(), n);
    to.write_at(offset, piece.data(), n);
  }
}

}  // namespace

BufferPool& DirectBuffers::take(std::size_t count, std::size_t nbytes) {
  if (!pool_ || count > count_ || nbytes > nbytes_) {
    pool_.reset();
    count_ = std::max(count, count_);
    nbytes_ = std::max(nbytes, nbytes_);
    pool_.emplace(count_, nbytes_);
  }
  return *pool_;
}

std::size_t direct_chunk_nbytes(const File& file, const WriteOptions& options) {
  return align_up(options.chunk_nbytes, file.direct_io_alignment().block_nbytes());
}

void write_direct(FileBody& body, File& file, std::uint64_t base_offset, WriteOptions options,
                  Progress& progress, const Poll& poll) {
  options.n_direct_threads = options.n_threads;
  options.direct_nbytes = body.nbytes();
  write_to_file(body, file, base_offset, options, progress, poll);
}

void write_to_file(FileBody& body, File& file, std::uint64_t base_offset,
                   const WriteOptions& options, Progress& progress, const Poll& poll) {
  const std::uint64_t n_first = options.direct_nbytes.value_or(0);
  const std::size_t n_cached_threads = n_first > 0 ? options.n_direct_threads : options.n_threads;
  const std::size_t n_direct_threads = std::max(options.n_direct_threads, n_cached_threads);
  // A buffer for each worker: a worker without a buffer could block the workers that have one.
  BufferPool gathered(std::min(std::max<std::size_t>(n_direct_threads, 1), body.n_chunks()),
                      gathered_nbytes(body), Count::kUpTo);
  const std::size_t n_threads = std::min(n_cached_threads, gathered.count());
  const std::size_t n_more = std::min(n_direct_threads, gathered.count()) - n_threads;
  const Gather gather = n_threads > 1 ? Gather::kAll : Gather::kWhatNeedsIt;
  DirectWriter direct(body, file, base_offset, options, gathered.count());
  MemoryGauge gauge;
  std::once_flag turned;
  bool has_buffers = false;
  run_body(body, n_threads, options.priority, progress, poll,
           [&](ChunkPipeline& pipeline, std::size_t i) {
             const bool is_first = body.chunk_range(i).begin < n_first;
             const bool is_shared = options.sharing != nullptr;
             if (is_shared || (direct.is_possible() && (is_first || !gauge.is_cheap()))) {
               std::call_once(turned, [&] {
                 has_buffers = direct.take_buffers();
                 pipeline.add_workers(n_more);
               });
               if (has_buffers && (is_shared || direct.is_possible())) {
                 return direct.write(pipeline, i);
               }
             }
             const BufferPool::Lease buffer(gathered);
             write_cached(body, pipeline, i, file, base_offset, options.compute_crcs, gather,
                          buffer.data(), gauge);
           });
  const std::uint64_t end = body.nbytes() - direct.rest().size();
  const std::string tail = direct.rest() + checked_tail(body, options);
  file.write_at(base_offset + end, tail.data(), tail.size());
  const FileBody::Patch patch = body.patch();
  file.write_at(base_offset + patch.offset, patch.bytes.data(), patch.bytes.size());
  progress.store(end + tail.size(), std::memory_order_relaxed);
}

void overwrite(const std::string& path, File* scratch, std::uint64_t nbytes, bool durable,
               const std::function<void(File&)>& write, const Poll& poll) {
  if (scratch != nullptr) write(*scratch);
  InPlaceFile target(path, path, poll);
  target.clear(nbytes);
  if (scratch == nullptr) {
    write(target.file());
  } else {
    target.file().preallocate(nbytes);
    copy_file(*scratch, target.file(), nbytes, poll);
  }
  target.commit(durable);
}

void write_to_memory(FileBody& body, std::byte* out, const WriteOptions& options,
                     Progress& progress, const Poll& poll) {
  run_body(body, options.n_threads, options.priority, progress, poll,
           [&](ChunkPipeline& pipeline, std::size_t i) {
             MemoryChunk chunk(out + body.chunk_range(i).begin, options.compute_crcs);
             body.produce(pipeline, i, chunk);
           });
  const std::string tail = checked_tail(body, options);
  std::memcpy(out + body.nbytes(), tail.data(), tail.size());
  const FileBody::Patch patch = body.patch();
  std::memcpy(out + patch.offset, patch.bytes.data(), patch.bytes.size());
  progress.store(body.nbytes() + tail.size(), std::memory_order_relaxed);
}

void write_to_stream(FileBody& body, const StreamSink& sink, const WriteOptions& options,
                     Progress& progress) {
  const Mapping buffer(gathered_nbytes(body));
  run_body(
      body, 0, Priority::kOfCaller, progress, [] {},
      [&](ChunkPipeline& pipeline, std::size_t i) {
        GatheringChunk chunk(sink, options.compute_crcs, Gather::kWhatNeedsIt,
                             {buffer.data(), gathered_nbytes(body)});
        body.produce(pipeline, i, chunk);
        chunk.flush();
      });
  const std::string tail = checked_tail(body, options);
  if (!tail.empty()) sink(reinterpret_cast<const std::byte*>(tail.data()), tail.size());
  progress.store(body.nbytes() + tail.size(), std::memory_order_relaxed);
}

}  // namespace ptsave
