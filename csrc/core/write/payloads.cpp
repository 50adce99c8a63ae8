#include "core/write/payloads.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <stdexcept>
#include <utility>

#include "core/base/error.h"
#include "core/io/ranges.h"
#include "core/memory/buffer.h"

namespace ptsave {

class SourceStager::Pieces final : public StagedPieces {
 public:
  explicit Pieces(BufferPool& pool) : buffer_(pool) {}
  std::byte* place() { return buffer_.data(); }
  const std::byte* data() const override { return buffer_.data(); }

 private:
  BufferPool::Lease buffer_;
};

// A piece that is used from where it is in memory.
class SourceStager::PieceInMemory final : public StagedPieces {
 public:
  explicit PieceInMemory(const std::byte* data) : data_(data) {}
  const std::byte* data() const override { return data_; }

 private:
  const std::byte* data_;
};

namespace {

// Adds the ranges of files that hold a piece of a payload.
void add_ranges(const SourcePayload& payload, const PayloadPiece& piece, std::byte* place,
                std::vector<FileRange>& ranges) {
  if (payload.parts.empty()) {
    ranges.push_back({payload.source, payload.offset + piece.offset, piece.nbytes, place});
    return;
  }
  const std::uint64_t end = piece.offset + piece.nbytes;
  auto part = std::ranges::upper_bound(payload.parts, piece.offset, {}, &SourcePart::begin);
  for (--part; part != payload.parts.end() && part->begin < end; ++part) {
    const auto next = std::next(part);
    const std::uint64_t first = std::max(part->begin, piece.offset);
    const std::uint64_t last = next == payload.parts.end() ? end : std::min(next->begin, end);
    ranges.push_back({part->source, part->offset + (first - part->begin), last - first,
                      place + (first - piece.offset)});
  }
}

}  // namespace

SourceStager::SourceStager(std::span<const ByteSource> sources,
                           std::span<const SourcePayload> payloads, Buffers buffers)
    : sources_(sources),
      payloads_(payloads),
      staged_(buffers.max_count, buffers.max_nbytes),
      windows_(buffers.max_count, RangeList::kWindowNbytes) {}

std::unique_ptr<StagedPieces> SourceStager::stage(std::size_t /*chunk*/,
                                                  std::span<const PayloadPiece> pieces) {
  if (pieces.size() == 1) {
    if (const std::byte* data = in_memory(pieces.front())) {
      return std::make_unique<PieceInMemory>(data);
    }
  }
  auto staged = std::make_unique<Pieces>(staged_);
  std::vector<FileRange> ranges;
  ranges.reserve(pieces.size());
  std::byte* place = staged->place();
  for (const PayloadPiece& piece : pieces) {
    add_ranges(payloads_[piece.record], piece, place, ranges);
    place += piece.nbytes;
  }
  const RangeList list(sources_, std::move(ranges));
  for (std::size_t i = 0; i < list.n_stretches(); ++i) list.read(i, windows_);
  return staged;
}

const std::byte* SourceStager::in_memory(const PayloadPiece& piece) const {
  const SourcePayload& payload = payloads_[piece.record];
  if (payload.source >= sources_.size() || !payload.parts.empty()) return nullptr;
  const ByteSource& source = sources_[payload.source];
  const std::uint64_t begin = payload.offset + piece.offset;
  const bool is_inside = begin <= source.nbytes() && piece.nbytes <= source.nbytes() - begin;
  if (source.memory() == nullptr || !is_inside) return nullptr;  // reading it throws the error
  return source.memory() + begin;
}

std::vector<DamagedPayload> damaged_payloads(std::span<const SourcePayload> payloads,
                                             std::span<const std::uint32_t> crcs) {
  std::vector<DamagedPayload> damaged;
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    if (payloads[i].crc && *payloads[i].crc != crcs[i]) damaged.push_back({i, crcs[i]});
  }
  return damaged;
}

std::unique_ptr<Stager> SourcedPayloads::begin_write(WriteOptions& options) {
  // Chunks may grow to whole blocks of a disk.
  const std::size_t nbytes = max_staged_nbytes(align_up(options.chunk_nbytes, kHugePageNbytes));
  // Each thread holds two buffers: 8 threads instead of 2 took a tenth less time and 40 MiB more.
  options.n_direct_threads = std::min(options.n_direct_threads, options.n_threads + 1);
  // A buffer for each thread: one that waited for a buffer could block the threads that have one.
  const auto count = std::max<std::size_t>({options.n_threads, options.n_direct_threads, 1});
  auto stager =
      std::make_unique<SourceStager>(*sources_, payloads_, SourceStager::Buffers{nbytes, count});
  damaged_.clear();
  options.stager = stager.get();
  if (!options.compute_crcs) return stager;
  options.check_crcs = [this](std::span<const std::uint32_t> crcs) {
    damaged_ = damaged_payloads(payloads_, crcs);
    if (damaged_.empty()) return;
    const ByteSource& source = (*sources_)[payloads_[damaged_.front().record].source];
    throw FormatError("a checksum does not match", "what was read", {}, FormatError::kNoOffset,
                      source.name());
  };
  return stager;
}

namespace {

constexpr std::uint64_t kFrontNbytes = 8;  // the bytes that descriptor_lookalike() needs

// Pieces whose memory StagedAhead owns.
class KeptPieces final : public StagedPieces {
 public:
  explicit KeptPieces(const std::byte* data) : data_(data) {}
  const std::byte* data() const override { return data_; }

 private:
  const std::byte* data_;
};

}  // namespace

std::vector<PayloadPiece> staged_pieces(const ArchiveLayout& layout, const Stager& stager,
                                        std::uint64_t begin, std::uint64_t end) {
  std::vector<PayloadPiece> pieces;
  for (std::size_t i = layout.first_record_after(begin); i < layout.size(); ++i) {
    const RecordLayout& record = layout.record(i);
    if (record.payload_offset >= end) break;
    const std::uint64_t from = std::max(begin, record.payload_offset);
    std::uint64_t to = std::min(end, record.payload_end());
    if (from >= to || !stager.stages(i)) continue;
    if (from == record.payload_offset) {
      to = std::max(to, from + std::min(kFrontNbytes, record.nbytes));
    }
    pieces.push_back({i, from - record.payload_offset, to - from});
  }
  return pieces;
}

std::size_t max_staged_nbytes(std::size_t chunk_nbytes) { return chunk_nbytes + kFrontNbytes; }

StagedAhead::StagedAhead(const ArchiveLayout& layout, std::unique_ptr<Stager> stager,
                         std::size_t chunk_nbytes)
    : layout_(layout), stager_(std::move(stager)), chunk_nbytes_(chunk_nbytes) {
  for (std::size_t i = 0; i < layout.size(); ++i) is_staged_.push_back(stager_->stages(i));
}

StagedAhead::~StagedAhead() = default;

std::vector<PayloadPiece> StagedAhead::pieces_of(std::size_t chunk, const Stager& stager) const {
  const std::uint64_t begin = std::uint64_t{chunk} * chunk_nbytes_;
  return staged_pieces(layout_, stager, begin, std::min(begin + chunk_nbytes_, layout_.nbytes()));
}

void StagedAhead::run(std::size_t n_threads, const Poll& poll) {
  chunks_.resize((layout_.nbytes() + chunk_nbytes_ - 1) / chunk_nbytes_);
  ChunkPipeline pipeline(chunks_.size(), n_threads,
                         [&](ChunkPipeline& /*pipeline*/, std::size_t chunk) {
                           const std::vector<PayloadPiece> pieces = pieces_of(chunk, *stager_);
                           if (!pieces.empty()) chunks_[chunk] = stager_->stage(chunk, pieces);
                         });
  pipeline.finish(poll);
  stager_.reset();
}

std::unique_ptr<StagedPieces> StagedAhead::stage(std::size_t chunk,
                                                 std::span<const PayloadPiece> pieces) {
  if (!std::ranges::equal(pieces_of(chunk, *this), pieces) || chunks_.at(chunk) == nullptr) {
    throw std::logic_error("staged with chunks of another size");
  }
  return std::make_unique<KeptPieces>(chunks_[chunk]->data());
}

}  // namespace ptsave
