#include "core/write/checked_body.h"

#include <algorithm>
#include <array>
#include <memory>

#include "core/memory/pages.h"

namespace ptsave {
namespace {

constexpr std::uint64_t kBlock = kCheckedBlockNbytes;

// Cuts bytes into blocks and records their checksums.
class CheckedSink {
 public:
  // `offset` is a block's.
  CheckedSink(ChunkSink& sink, std::uint64_t offset, std::vector<std::uint32_t>& crcs)
      : sink_(sink), at_(offset), crcs_(crcs) {}

  void put(const std::byte* data, std::uint64_t nbytes) {
    while (nbytes > 0) {
      const std::uint64_t n = std::min(nbytes, kBlock - at_ % kBlock);
      crc_ = sink_.put_payload(data, n, crc_);
      at_ += n;
      data += n;
      nbytes -= n;
      if (at_ % kBlock == 0) {
        crcs_[at_ / kBlock - 1] = crc_;
        crc_ = 0;
      }
    }
  }
  void put_zeros_until(std::uint64_t end) {
    static constexpr std::array<std::byte, kBlock> kZeros{};
    while (at_ < end) put(kZeros.data(), std::min(end - at_, kBlock));
  }

 private:
  ChunkSink& sink_;
  std::uint64_t at_;
  std::uint32_t crc_ = 0;
  std::vector<std::uint32_t>& crcs_;
};

}  // namespace

CheckedBody::CheckedBody(std::span<const PlacedPiece> pieces, Stager* stager,
                         std::size_t chunk_nbytes)
    : FileBody(nbytes_of(pieces), chunk_nbytes),
      pieces_(pieces),
      stager_(stager),
      crcs_(nbytes() / kBlock) {}

std::uint64_t CheckedBody::nbytes_of(std::span<const PlacedPiece> pieces) {
  return pieces.empty() ? 0 : align_up(pieces.back().end(), kBlock);
}

std::vector<std::size_t> CheckedBody::pieces_of(ByteRange range) const {
  std::vector<std::size_t> found;
  const auto first = std::ranges::upper_bound(pieces_, range.begin, {}, &PlacedPiece::end);
  for (auto i = static_cast<std::size_t>(first - pieces_.begin());
       i < pieces_.size() && pieces_[i].offset < range.end; ++i) {
    if (pieces_[i].nbytes > 0) found.push_back(i);
  }
  return found;
}

void CheckedBody::produce(ChunkPipeline& /*pipeline*/, std::size_t chunk, ChunkSink& sink) {
  const ByteRange range = chunk_range(chunk);
  const std::vector<std::size_t> found = pieces_of(range);
  const auto part_of = [&](std::size_t i) {
    return intersect(range, {pieces_[i].offset, pieces_[i].end()});
  };
  std::vector<PayloadPiece> to_stage;
  for (const std::size_t i : found) {
    const ByteRange part = part_of(i);
    if (pieces_[i].data == nullptr) {
      to_stage.push_back({i, part.begin - pieces_[i].offset, part.nbytes()});
    }
  }
  std::unique_ptr<StagedPieces> staged;
  if (!to_stage.empty()) staged = stager_->stage(chunk, to_stage);
  const std::byte* next = staged ? staged->data() : nullptr;
  CheckedSink out(sink, range.begin, crcs_);
  for (const std::size_t i : found) {
    const ByteRange part = part_of(i);
    out.put_zeros_until(part.begin);
    if (pieces_[i].data != nullptr) {
      out.put(pieces_[i].data + (part.begin - pieces_[i].offset), part.nbytes());
    } else {
      out.put(next, part.nbytes());
      next += part.nbytes();
    }
  }
  out.put_zeros_until(range.end);
}

// All supported machines are little-endian.
std::string CheckedBody::tail() {
  return {reinterpret_cast<const char*>(crcs_.data()), crcs_.size() * sizeof(std::uint32_t)};
}

}  // namespace ptsave
