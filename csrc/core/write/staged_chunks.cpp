#include "core/write/staged_chunks.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace ptsave {
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
