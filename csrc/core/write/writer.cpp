#include "core/write/writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/memory/buffer.h"

namespace ptsave {
namespace {

// Payload pieces below this are gathered with their neighbours into one write.
constexpr std::size_t kGatherNbytes = std::size_t{64} << 10;
// Gathered bytes are written when they reach this size.
constexpr std::size_t kMaxGatheredNbytes = std::size_t{256} << 10;

// Copies a chunk into memory.
class MemoryChunk final : public ChunkSink {
 public:
  MemoryChunk(std::byte* out, bool compute_crcs) : out_(out), compute_crcs_(compute_crcs) {}

  std::uint32_t put_payload(const std::byte* data, std::size_t nbytes, std::uint32_t crc) override {
    if (!compute_crcs_) {
      put_seam(data, nbytes);
      return crc;
    }
    std::byte* const out = std::exchange(out_, out_ + nbytes);
    return crc32_copy(crc, out, data, nbytes);
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

// Hands a chunk on in large pieces: large payload pieces from where they are, the rest gathered.
class GatheringChunk final : public ChunkSink {
 public:
  GatheringChunk(const StreamSink& sink, bool compute_crcs)
      : sink_(sink), compute_crcs_(compute_crcs) {}

  std::uint32_t put_payload(const std::byte* data, std::size_t nbytes, std::uint32_t crc) override {
    for (std::size_t done = 0; done < nbytes;) {
      const std::size_t piece = std::min(nbytes - done, kCachePieceNbytes);
      if (compute_crcs_) crc = crc32(crc, data + done, piece);
      put_piece(data + done, piece);
      done += piece;
    }
    return crc;
  }
  void put_seam(const std::byte* data, std::size_t nbytes) override {
    if (gathered_.size() + nbytes > kMaxGatheredNbytes) flush();
    gathered_.insert(gathered_.end(), data, data + nbytes);
  }
  void put_hole(std::uint64_t nbytes) override {
    flush();
    sink_(nullptr, nbytes);
  }
  void flush() {
    if (!gathered_.empty()) sink_(gathered_.data(), gathered_.size());
    gathered_.clear();
  }

 private:
  void put_piece(const std::byte* data, std::size_t nbytes) {
    if (nbytes < kGatherNbytes) return put_seam(data, nbytes);
    flush();
    sink_(data, nbytes);
  }

  const StreamSink& sink_;
  bool compute_crcs_;
  std::vector<std::byte> gathered_;
};

// Runs `write_chunk` over the body's chunks.  One chunk is written faster than a thread starts.
void run_chunks(FileBody& body, std::size_t n_threads, Progress& progress, const Poll& poll,
                const ChunkPipeline::Work& write_chunk) {
  ChunkPipeline pipeline(body.n_chunks(), body.n_chunks() > 1 ? n_threads : 0,
                         [&](ChunkPipeline& self, std::size_t chunk) {
                           write_chunk(self, chunk);
                           progress.fetch_add(body.chunk_range(chunk).nbytes(),
                                              std::memory_order_relaxed);
                         });
  body.prepare_tail();
  pipeline.finish(poll);
}

std::string checked_tail(FileBody& body, const WriteOptions& options) {
  std::string tail = body.tail();
  if (options.check_crcs) options.check_crcs(body.crcs());
  return tail;
}

// Writes an aligned buffer to a file in direct mode.  A kernel that refuses (EINVAL) although it
// promised direct I/O gets the rest of the file through the page cache.
void write_aligned(File& file, std::uint64_t offset, const std::byte* data, std::size_t nbytes) {
  try {
    file.write_at(offset, data, nbytes);
  } catch (const IoError& error) {
    if (error.errnum() != EINVAL || !file.set_direct(false)) throw;
    file.write_at(offset, data, nbytes);
  }
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

void write_buffered(const ArchiveLayout& layout, const Payloads& payloads, File& file,
                    std::uint64_t base_offset, const WriteOptions& options, Progress& progress,
                    const Poll& poll) {
  ArchiveBody body(layout, payloads, options.stager, options.compute_crcs, options.chunk_nbytes);
  write_buffered(body, file, base_offset, options, progress, poll);
}

void write_buffered(FileBody& body, File& file, std::uint64_t base_offset,
                    const WriteOptions& options, Progress& progress, const Poll& poll) {
  run_chunks(body, options.n_threads, progress, poll, [&](ChunkPipeline& pipeline, std::size_t i) {
    std::uint64_t offset = base_offset + body.chunk_range(i).begin;
    const StreamSink sink = [&](const std::byte* data, std::uint64_t nbytes) {
      if (data != nullptr) file.write_at(offset, data, nbytes);
      offset += nbytes;
    };
    GatheringChunk chunk(sink, options.compute_crcs);
    body.produce(pipeline, i, chunk);
    chunk.flush();
  });
  const std::string tail = checked_tail(body, options);
  file.write_at(base_offset + body.nbytes(), tail.data(), tail.size());
  progress.store(body.nbytes() + tail.size(), std::memory_order_relaxed);
}

std::size_t direct_chunk_nbytes(const File& file, const WriteOptions& options) {
  return align_up(options.chunk_nbytes, file.direct_io_alignment().block_nbytes());
}

void write_direct(const ArchiveLayout& layout, const Payloads& payloads, File& file,
                  const WriteOptions& options, Progress& progress, const Poll& poll) {
  ArchiveBody body(layout, payloads, options.stager, options.compute_crcs,
                   direct_chunk_nbytes(file, options));
  write_direct(body, file, 0, options, progress, poll);
}

void write_direct(FileBody& body, File& file, std::uint64_t base_offset,
                  const WriteOptions& options, Progress& progress, const Poll& poll) {
  // Only whole blocks can be written directly; the rest of the body goes with the tail.
  const std::uint64_t aligned_end =
      align_down(body.nbytes(), file.direct_io_alignment().block_nbytes());
  std::string rest;
  BufferPool buffers(std::min(std::max<std::size_t>(options.n_threads, 1), body.n_chunks()),
                     body.chunk_nbytes());
  file.set_direct(true);
  run_chunks(body, options.n_threads, progress, poll, [&](ChunkPipeline& pipeline, std::size_t i) {
    const ByteRange range = body.chunk_range(i);
    const BufferPool::Lease buffer(buffers);
    MemoryChunk chunk(buffer.data(), options.compute_crcs);
    body.produce(pipeline, i, chunk);
    const std::size_t nbytes = std::min(range.end, aligned_end) - range.begin;
    if (range.end > aligned_end) {
      rest.assign(reinterpret_cast<const char*>(buffer.data()) + nbytes, range.nbytes() - nbytes);
    }
    if (nbytes > 0) write_aligned(file, base_offset + range.begin, buffer.data(), nbytes);
  });
  if (!file.set_direct(false)) throw IoError(errno, "fcntl", file.path());
  rest += checked_tail(body, options);
  file.write_at(base_offset + aligned_end, rest.data(), rest.size());
  progress.store(aligned_end + rest.size(), std::memory_order_relaxed);
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

void write_to_memory(const ArchiveLayout& layout, const Payloads& payloads, std::byte* out,
                     const WriteOptions& options, Progress& progress, const Poll& poll) {
  ArchiveBody body(layout, payloads, options.stager, options.compute_crcs, options.chunk_nbytes);
  run_chunks(body, options.n_threads, progress, poll, [&](ChunkPipeline& pipeline, std::size_t i) {
    MemoryChunk chunk(out + body.chunk_range(i).begin, options.compute_crcs);
    body.produce(pipeline, i, chunk);
  });
  const std::string tail = checked_tail(body, options);
  std::memcpy(out + body.nbytes(), tail.data(), tail.size());
  progress.store(layout.nbytes(), std::memory_order_relaxed);
}

void write_to_stream(const ArchiveLayout& layout, const Payloads& payloads, const StreamSink& sink,
                     const WriteOptions& options, Progress& progress) {
  ArchiveBody body(layout, payloads, options.stager, options.compute_crcs, options.chunk_nbytes);
  write_to_stream(body, sink, options, progress);
}

void write_to_stream(FileBody& body, const StreamSink& sink, const WriteOptions& options,
                     Progress& progress) {
  run_chunks(
      body, 0, progress, [] {},
      [&](ChunkPipeline& pipeline, std::size_t i) {
        GatheringChunk chunk(sink, options.compute_crcs);
        body.produce(pipeline, i, chunk);
        chunk.flush();
      });
  const std::string tail = checked_tail(body, options);
  if (!tail.empty()) sink(reinterpret_cast<const std::byte*>(tail.data()), tail.size());
  progress.store(body.nbytes() + tail.size(), std::memory_order_relaxed);
}

}  // namespace ptsave
