#include "core/write/packed_body.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <utility>

#include "core/crc/crc32.h"

namespace ptsave {

PackedBody::PackedBody(const std::string& header, std::span<const std::uint64_t> payload_nbytes,
                       Stager& stager, bool compute_crcs, std::size_t chunk_nbytes)
    : FileBody(std::accumulate(payload_nbytes.begin(), payload_nbytes.end(),
                               std::uint64_t{header.size()}),
               chunk_nbytes),
      header_(header),
      stager_(stager),
      compute_crcs_(compute_crcs),
      pieces_(n_chunks()),
      crcs_(payload_nbytes.size()) {
  std::uint64_t end = header.size();
  ends_.reserve(payload_nbytes.size());
  for (const std::uint64_t nbytes : payload_nbytes) ends_.push_back(end += nbytes);
}

std::vector<PayloadPiece> PackedBody::pieces_of(std::size_t chunk) const {
  const ByteRange range = chunk_range(chunk);
  std::vector<PayloadPiece> pieces;
  const auto first = std::ranges::upper_bound(ends_, range.begin);
  for (auto i = static_cast<std::size_t>(first - ends_.begin()); i < ends_.size(); ++i) {
    const ByteRange payload{i == 0 ? header_.size() : ends_[i - 1], ends_[i]};
    if (payload.begin >= range.end) break;
    const ByteRange part = intersect(range, payload);
    if (!part.empty()) pieces.push_back({i, part.begin - payload.begin, part.nbytes()});
  }
  return pieces;
}

void PackedBody::produce(ChunkPipeline& /*pipeline*/, std::size_t chunk, ChunkSink& sink) {
  const ByteRange header = intersect(chunk_range(chunk), {0, header_.size()});
  if (!header.empty()) {
    sink.put_seam(reinterpret_cast<const std::byte*>(header_.data()) + header.begin,
                  header.nbytes());
  }
  const std::vector<PayloadPiece> pieces = pieces_of(chunk);
  if (pieces.empty()) return;
  std::unique_ptr<StagedPieces> staged;
  if (arriving_ == nullptr) staged = stager_.stage(chunk, pieces);
  const std::byte* data = staged != nullptr ? staged->data() : nullptr;
  for (const PayloadPiece& piece : pieces) {
    std::uint32_t crc = 0;
    const auto use = [&](std::span<const std::byte> bytes) {
      crc = sink.put_payload(bytes.data(), bytes.size(), crc);
    };
    if (staged != nullptr) {
      use({data, piece.nbytes});
      data += piece.nbytes;
    } else {
      arriving_->read(stager_.in_memory(piece), piece.nbytes, use);
    }
    if (compute_crcs_) pieces_[chunk].push_back({piece.record, piece.nbytes, crc});
  }
}

std::string PackedBody::tail() {
  for (const std::vector<PieceCrc>& chunk : pieces_) {
    for (const auto& [payload, nbytes, crc] : chunk) {
      crcs_[payload] = crc32_combine(crcs_[payload], crc, nbytes);
    }
  }
  return {};
}

}  // namespace ptsave
