// A file of pieces at places of their own, with a table of checksums of its blocks at the end: any
// part of it can be read and checked by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/io/checked_blocks.h"
#include "core/pipeline/stager.h"
#include "core/write/file_body.h"

namespace ptsave {

// Bytes at a position in the file; without `data` they are the stager's, under the piece's number.
struct PlacedPiece {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  const std::byte* data = nullptr;

  std::uint64_t end() const { return offset + nbytes; }
};

// The blocks of the file, zeros where no piece is; the tail is the table.
class CheckedBody final : public FileBody {
 public:
  // Pieces in the order of their offsets, without overlaps; they and the stager, which may be null,
  // outlive the body.  Chunks are whole blocks.
  CheckedBody(std::span<const PlacedPiece> pieces, Stager* stager, std::size_t chunk_nbytes);

  // Size of the blocks that hold all pieces.
  static std::uint64_t nbytes_of(std::span<const PlacedPiece> pieces);

  void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) override;
  std::string tail() override;
  // Those of the blocks.
  std::span<const std::uint32_t> crcs() override { return crcs_; }

 private:
  std::vector<std::size_t> pieces_of(ByteRange range) const;

  const std::span<const PlacedPiece> pieces_;
  Stager* const stager_;
  std::vector<std::uint32_t> crcs_;
};

}  // namespace ptsave
