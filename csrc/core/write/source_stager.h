// Stages payloads that are parts of other files, one chunk's pieces at a time.
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

// The source of a payload's bytes from position `begin` up to the next part.
struct SourcePart {
  std::uint64_t begin = 0;  // in the payload
  std::size_t source = 0;
  std::uint64_t offset = 0;
};

// The place of a payload in its source; its size is in the layout.
struct SourcePayload {
  static constexpr std::size_t kNoSource = ~std::size_t{0};

  std::size_t source = kNoSource;
  std::uint64_t offset = 0;
  std::optional<std::uint32_t> crc = std::nullopt;  // the expected one
  // The whole payload's parts in order, the first at 0, or none; `source` is then the source of one
  // of them.  The initializer silences gcc's warning about a missing member in braces.
  std::vector<SourcePart> parts = {};  // NOLINT(readability-redundant-member-init)
};

// Reads pieces through the page cache, or past it, into a bounded number of buffers.  A chunk with
// a single piece that is in memory is written from there.
class SourceStager final : public Stager {
 public:
  // Up to `max_count` chunks are in memory at a time, with up to `max_nbytes` staged bytes each.
  // There must not be more workers than `max_count`.
  struct Buffers {
    std::size_t max_nbytes = 0;
    std::size_t max_count = 0;
  };

  // `sources` and `payloads`, one for each record, must outlive this object.  Payloads without a
  // source come from elsewhere.
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

// A payload with a wrong CRC.
struct DamagedPayload {
  std::size_t record = 0;
  std::uint32_t crc = 0;  // of the bytes read
};

// Compares the CRCs of written payloads with the expected ones.  `crcs` may have more records than
// `payloads`.
std::vector<DamagedPayload> damaged_payloads(std::span<const SourcePayload> payloads,
                                             std::span<const std::uint32_t> crcs);

}  // namespace ptsave
