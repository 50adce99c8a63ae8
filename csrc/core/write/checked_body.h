// A file of pieces at given offsets, with a table of its blocks' checksums at the end, so that any
// part can be read and checked alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/crc/crc32.h"
#include "core/pipeline/stager.h"
#include "core/write/file_body.h"

namespace ptsave {

// Bytes at a position in the file; without `data`, the stager brings them by the piece's number.
struct PlacedPiece {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  const std::byte* data = nullptr;

  std::uint64_t end() const { return offset + nbytes; }
};

// The blocks of the file, with zeros between pieces; the tail is the table.
class CheckedBody final : public FileBody {
 public:
  // Pieces are in the order of their offsets, without overlaps; chunks are whole blocks.  Pieces
  // and stager, which may be null, must outlive the body.
  CheckedBody(std::span<const PlacedPiece> pieces, Stager* stager, std::size_t chunk_nbytes);

  // Size of the blocks that hold all pieces.
  static std::uint64_t nbytes_of(std::span<const PlacedPiece> pieces);

  void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) override;
  std::string tail() override;
  // The CRCs of the blocks.
  std::span<const std::uint32_t> crcs() override { return crcs_; }

 private:
  std::vector<std::size_t> pieces_of(ByteRange range) const;

  const std::span<const PlacedPiece> pieces_;
  Stager* const stager_;
  std::vector<std::uint32_t> crcs_;
};

}  // namespace ptsave
