#include "core/write/checked_plan.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/memory/pages.h"

namespace ptsave {

CheckedPlan::CheckedPlan(std::vector<PlacedPiece> pieces, std::unique_ptr<PayloadStaging> staging)
    : pieces_(std::move(pieces)), staging_(std::move(staging)) {
  for (std::size_t i = 1; i < pieces_.size(); ++i) {
    if (pieces_[i].offset < pieces_[i - 1].end()) {
      throw std::invalid_argument("pieces of a file overlap, or are not in its order");
    }
  }
}

std::uint64_t CheckedPlan::nbytes() const {
  const std::uint64_t nbytes = CheckedBody::nbytes_of(pieces_);
  return nbytes + nbytes / kCheckedBlockNbytes * sizeof(std::uint32_t);
}

std::unique_ptr<Stager> CheckedPlan::begin_write(WriteOptions& options) {
  options.chunk_nbytes =
      std::max(align_down(options.chunk_nbytes, kCheckedBlockNbytes), kCheckedBlockNbytes);
  std::unique_ptr<Stager> stager = staging_ ? staging_->begin_write(options) : nullptr;
  options.compute_crcs = true;
  // Replaces the staging's comparison, because these are checksums of blocks, not of pieces.
  options.check_crcs = [this](std::span<const std::uint32_t> crcs) {
    block_crcs_.assign(crcs.begin(), crcs.end());
  };
  return stager;
}

std::unique_ptr<FileBody> CheckedPlan::make_body(const WriteOptions& options,
                                                 std::size_t chunk_nbytes) const {
  return std::make_unique<CheckedBody>(pieces_, options.stager, chunk_nbytes);
}

}  // namespace ptsave
