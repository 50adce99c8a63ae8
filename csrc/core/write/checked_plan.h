// The plan of one rank's file in a distributed checkpoint: placed pieces and blocks' checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/write/checked_body.h"
#include "core/write/file_plan.h"

namespace ptsave {

class CheckedPlan final : public FilePlan {
 public:
  // `staging`, which may be null, brings the pieces without data; all other pieces must outlive the
  // plan.  Throws std::invalid_argument for pieces out of order.
  CheckedPlan(std::vector<PlacedPiece> pieces, std::unique_ptr<PayloadStaging> staging);

  std::uint64_t nbytes() const override;
  bool is_pinned() const override { return staging_ != nullptr && staging_->is_pinned(); }
  std::vector<DamagedPayload> damaged() const override { return {}; }
  // The CRCs of the last write's blocks, in order.
  std::span<const std::uint32_t> block_crcs() const { return block_crcs_; }

 protected:
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                      std::size_t chunk_nbytes) const override;

 private:
  std::vector<PlacedPiece> pieces_;
  std::unique_ptr<PayloadStaging> staging_;
  std::vector<std::uint32_t> block_crcs_;
};

}  // namespace ptsave
