// Payloads that are not in host memory: parts of other files, and memory of accelerators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/format/archive.h"
#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"
#include "core/write/writer.h"

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

// Brings the payloads of a file that are not in host memory while it is written.
class PayloadStaging {
 public:
  PayloadStaging() = default;
  PayloadStaging(const PayloadStaging&) = delete;
  PayloadStaging& operator=(const PayloadStaging&) = delete;
  virtual ~PayloadStaging() = default;

  // Makes the stager of one write and sets it in `options`; may also limit the threads there and
  // set a check of the CRCs.  This object must outlive the stager.
  virtual std::unique_ptr<Stager> begin_write(WriteOptions& options) = 0;
  // Returns a stager that keeps the payloads' present values; null for payloads that never change.
  virtual std::unique_ptr<Stager> hand_over() { return nullptr; }
  // Whether the stager needs page-locked memory.
  virtual bool is_pinned() const = 0;
  // The payloads of the last write with a wrong CRC.
  virtual std::vector<DamagedPayload> damaged() const { return {}; }
  // In a forked child, leaks objects that the parent's driver would have to free.
  virtual void abandon() {}
};

// Several plans may read from the same files.
using SharedSources = std::shared_ptr<const std::vector<ByteSource>>;

// Payloads that are parts of other files or of memory.
class SourcedPayloads final : public PayloadStaging {
 public:
  // One payload for each record; payloads without a source come from elsewhere.
  SourcedPayloads(SharedSources sources, std::vector<SourcePayload> payloads)
      : sources_(std::move(sources)), payloads_(std::move(payloads)) {}

  // For a wrong CRC, the write throws FormatError before it is complete.
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  bool is_pinned() const override { return false; }
  std::vector<DamagedPayload> damaged() const override { return damaged_; }

 private:
  SharedSources sources_;
  std::vector<SourcePayload> payloads_;
  std::vector<DamagedPayload> damaged_;
};

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
