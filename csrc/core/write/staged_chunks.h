// The pieces of payloads that a chunk of an archive needs from an accelerator, and StagedAhead,
// which brings all of them to the host before the write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/format/archive.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"

namespace ptsave {

// The pieces to stage for the bytes [begin, end) of the archive, in file order.  A payload's first
// piece has the 8 bytes that descriptor_lookalike() needs, even if the chunk ends earlier.
std::vector<PayloadPiece> staged_pieces(const ArchiveLayout& layout, const Stager& stager,
                                        std::uint64_t begin, std::uint64_t end);

// The maximum number of bytes in staged_pieces() of a chunk.
std::size_t max_staged_nbytes(std::size_t chunk_nbytes);

// Stages everything first, so that the tensors may change while the archive is written.  Keeps the
// staged bytes, so that a failed write may be retried.
class StagedAhead final : public Stager {
 public:
  // `layout` must outlive it.
  StagedAhead(const ArchiveLayout& layout, std::unique_ptr<Stager> stager,
              std::size_t chunk_nbytes);
  ~StagedAhead() override;

  // Stages all chunks on n_threads threads, and then releases the storages.
  void run(std::size_t n_threads, const Poll& poll);

  bool stages(std::size_t record) const override { return is_staged_[record]; }
  // Throws std::logic_error for chunks of another size than the staged ones.
  std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                      std::span<const PayloadPiece> pieces) override;

 private:
  std::vector<PayloadPiece> pieces_of(std::size_t chunk, const Stager& stager) const;

  const ArchiveLayout& layout_;
  std::unique_ptr<Stager> stager_;
  const std::size_t chunk_nbytes_;
  std::vector<bool> is_staged_;                        // by record
  std::vector<std::unique_ptr<StagedPieces>> chunks_;  // null for chunks without staged pieces
};

}  // namespace ptsave
