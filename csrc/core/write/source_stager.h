// Payloads that are parts of other files; of each, only the piece of a chunk is in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/stager.h"

namespace ptsave {

// Where the bytes of a payload come from, from one position in it up to the next part.
struct SourcePart {
  std::uint64_t begin = 0;  // in the payload
  std::size_t source = 0;
  std::uint64_t offset = 0;
};

// The beginning of a payload in a source; its size is in the layout.
struct SourcePayload {
  static constexpr std::size_t kNoSource = ~std::size_t{0};

  std::size_t source = kNoSource;
  std::uint64_t offset = 0;
  std::optional<std::uint32_t> crc = std::nullopt;  // the expected one
  // If there are any, they are all of it, in order, the first at 0; `source` is that of one.
  // Its initializer is for gcc, which warns of braces that leave out members without one.
  std::vector<SourcePart> parts = {};  // NOLINT(readability-redundant-member-init)
};

// Reads pieces from the page cache, or past it, into a bounded number of buffers; a chunk that is a
// single piece of memory is written from there.
class SourceStager final : public Stager {
 public:
  // Up to `max_count` chunks are in memory at a time, which more workers than that must not need,
  // with up to `max_nbytes` bytes of such payloads in each.
  struct Buffers {
    std::size_t max_nbytes = 0;
    std::size_t max_count = 0;
  };

  // `sources` and `payloads`, one for each record, must outlive it; those without a source come
  // from elsewhere.
  SourceStager(std::span<const ByteSource> sources, std::span<const SourcePayload> payloads,
               Buffers buffers);

  bool stages(std::size_t record) const override {
    return record < payloads_.size() && payloads_[record].source != SourcePayload::kNoSource;
  }
  const std::byte* in_memory(const PayloadPiece& piece) const override;
  std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                      std::span<const PayloadPiece> pieces) override;

 private:
  class Pieces;
  class PieceInMemory;

  std::span<const ByteSource> sources_;
  std::span<const SourcePayload> payloads_;
  BufferPool staged_;
  BufferPool windows_;  // of direct reads
};

// A payload whose bytes are not those that they should be.
struct DamagedPayload {
  std::size_t record = 0;
  std::uint32_t crc = 0;  // of the bytes that were read
};

// Compares the CRCs of written payloads with the sources'.  `crcs` may be of more records than
// `payloads`.
std::vector<DamagedPayload> damaged_payloads(std::span<const SourcePayload> payloads,
                                             std::span<const std::uint32_t> crcs);

}  // namespace ptsave
