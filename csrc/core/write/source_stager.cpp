#include "core/write/source_stager.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/io/ranges.h"

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

}  // namespace ptsave
