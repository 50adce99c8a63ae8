// Payloads that are not in host memory: parts of other files, and memory of accelerators.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/owner.h"
#include "core/format/archive.h"
#include "core/io/ranges.h"
#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"
#include "core/write/file_body.h"
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
  // The parts of the whole payload in order, the first at 0.  With parts, `source` is the source of
  // one of them.  Empty if the payload is one range.  The initializer silences gcc's warning about
  // a missing member in braces.
  std::vector<SourcePart> parts = {};  // NOLINT(readability-redundant-member-init)
};

// Pieces in memory that another object owns.
class BorrowedPieces final : public StagedPieces {
 public:
  explicit BorrowedPieces(const std::byte* data) : data_(data) {}
  const std::byte* data() const override { return data_; }

 private:
  const std::byte* data_;
};

// Adds the ranges of files that hold a piece of a payload.
inline void add_ranges(const SourcePayload& payload, const PayloadPiece& piece, std::byte* place,
                       std::vector<FileRange>& ranges) {
  if (payload.parts.empty()) {
    ranges.push_back({payload.source, payload.offset + piece.offset, piece.nbytes, place});
    return;
  }
  const std::uint64_t end = piece.offset + piece.nbytes;
  auto part = std::ranges::upper_bound(payload.parts, piece.offset, {}, &SourcePart::begin);
  for (--part; part != payload.parts.end() && part->begin < end; ++part) {
    const auto next = std::next(part);
    const std::uint64_t first = std::max(part->begin, piece.offset);
    const std::uint64_t last = next == payload.parts.end() ? end : std::min(next->begin, end);
    ranges.push_back({part->source, part->offset + (first - part->begin), last - first,
                      place + (first - piece.offset)});
  }
}

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

  // `sources` and `payloads`, one for each record, must outlive this object.  This stager does not
  // bring payloads without a source.
  SourceStager(std::span<const ByteSource> sources, std::span<const SourcePayload> payloads,
               Buffers buffers)
      : sources_(sources),
        payloads_(payloads),
        staged_(buffers.max_count, buffers.max_nbytes),
        windows_(buffers.max_count, RangeList::kWindowNbytes) {}

  bool stages(std::size_t record) const override {
    return record < payloads_.size() && payloads_[record].source != SourcePayload::kNoSource;
  }
  const std::byte* in_memory(const PayloadPiece& piece) const override {
    const SourcePayload& payload = payloads_[piece.record];
    if (payload.source >= sources_.size() || !payload.parts.empty()) return nullptr;
    const ByteSource& source = sources_[payload.source];
    const std::uint64_t begin = payload.offset + piece.offset;
    const bool is_inside = begin <= source.nbytes() && piece.nbytes <= source.nbytes() - begin;
    if (source.memory() == nullptr || !is_inside) return nullptr;  // reading it throws the error
    return source.memory() + begin;
  }
  std::unique_ptr<StagedPieces> stage(std::size_t /*chunk*/,
                                      std::span<const PayloadPiece> pieces) override {
    if (pieces.size() == 1) {
      if (const std::byte* data = in_memory(pieces.front())) {
        return std::make_unique<BorrowedPieces>(data);
      }
    }
    auto staged = std::make_unique<Pieces>(staged_);
    std::vector<FileRange> ranges;
    ranges.reserve(pieces.size());
    std::byte* place = staged->place();
    for (const PayloadPiece& piece : pieces) {
      add_ranges(payloads_[piece.record], piece, place, ranges);
      place += piece.nbytes;
    }
    const RangeList list(sources_, std::move(ranges));
    for (std::size_t i = 0; i < list.n_stretches(); ++i) list.read(i, windows_);
    return staged;
  }

 private:
  class Pieces final : public StagedPieces {
   public:
    explicit Pieces(BufferPool& pool) : buffer_(pool) {}
    std::byte* place() { return buffer_.data(); }
    const std::byte* data() const override { return buffer_.data(); }

   private:
    BufferPool::Lease buffer_;
  };

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
inline std::vector<DamagedPayload> damaged_payloads(std::span<const SourcePayload> payloads,
                                                    std::span<const std::uint32_t> crcs) {
  std::vector<DamagedPayload> damaged;
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    if (payloads[i].crc && *payloads[i].crc != crcs[i]) damaged.push_back({i, crcs[i]});
  }
  return damaged;
}

// Brings the payloads of a file that are not in host memory while it is written.
class PayloadStaging : public Interface {
 public:
  // Makes the stager of one write and sets it in `options`; may also limit the threads there and
  // set a check of the CRCs.  This object must outlive the stager.
  virtual std::unique_ptr<Stager> begin_write(WriteOptions& options) = 0;
  // Returns a stager that keeps the payloads' present values; null for payloads that never change.
  virtual std::unique_ptr<Stager> hand_over() { return nullptr; }
  // Whether the stager needs page-locked memory.
  virtual bool is_pinned() const = 0;
  // The payloads that had a wrong CRC in the last write.
  virtual std::vector<DamagedPayload> damaged() const { return {}; }
  // In a forked child, leaks objects that the parent's driver would have to free.
  virtual void abandon() {}
};

// Several plans may read from the same files.
using SharedSources = std::shared_ptr<const std::vector<ByteSource>>;

// Payloads that are parts of other files or of memory.
class SourcedPayloads final : public PayloadStaging {
 public:
  // One payload for each record; this object does not bring payloads without a source.
  SourcedPayloads(SharedSources sources, std::vector<SourcePayload> payloads)
      : sources_(std::move(sources)), payloads_(std::move(payloads)) {}

  // For a wrong CRC, the write throws FormatError before it is complete.
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override {
    // Chunks may grow to whole blocks of a disk.
    const std::size_t nbytes = max_staged_nbytes(align_up(options.chunk_nbytes, kHugePageNbytes));
    // Each thread holds two buffers: 8 threads instead of 2 took a tenth less time and 40 MiB more.
    options.n_direct_threads = std::min(options.n_direct_threads, options.n_threads + 1);
    // A buffer for each thread: a thread without a buffer could block the threads that have one.
    const auto count = std::max<std::size_t>({options.n_threads, options.n_direct_threads, 1});
    auto stager =
        std::make_unique<SourceStager>(*sources_, payloads_, SourceStager::Buffers{nbytes, count});
    damaged_.clear();
    options.stager = stager.get();
    if (!options.compute_crcs) return stager;
    options.check_crcs = [this](std::span<const std::uint32_t> crcs) {
      damaged_ = damaged_payloads(payloads_, crcs);
      if (damaged_.empty()) return;
      const ByteSource& source = (*sources_)[payloads_[damaged_.front().record].source];
      throw FormatError("a checksum does not match", "the bytes read are damaged", {},
                        FormatError::kNoOffset, source.name());
    };
    return stager;
  }

  bool is_pinned() const override { return false; }
  std::vector<DamagedPayload> damaged() const override { return damaged_; }

 private:
  SharedSources sources_;
  std::vector<SourcePayload> payloads_;
  std::vector<DamagedPayload> damaged_;
};

// Stages everything first, so that the tensors may change while the archive is written.  Keeps the
// staged bytes, so that a failed write may be retried.
class StagedAhead final : public Stager {
 public:
  // `layout` must outlive this object.
  StagedAhead(const ArchiveLayout& layout, std::unique_ptr<Stager> stager, std::size_t chunk_nbytes)
      : layout_(layout), stager_(std::move(stager)), chunk_nbytes_(chunk_nbytes) {
    for (std::size_t i = 0; i < layout.size(); ++i) is_staged_.push_back(stager_->stages(i));
  }

  // Stages all chunks on n_threads threads, and then releases the storages.
  void run(std::size_t n_threads, const Poll& poll) {
    chunks_.resize((layout_.nbytes() + chunk_nbytes_ - 1) / chunk_nbytes_);
    const auto stage_chunk = [&](std::size_t chunk) {
      const std::vector<PayloadPiece> pieces = pieces_of(chunk, *stager_);
      if (!pieces.empty()) chunks_[chunk] = stager_->stage(chunk, pieces);
    };
    run_chunks(chunks_.size(), n_threads, stage_chunk, poll);
    stager_.reset();
  }

  bool stages(std::size_t record) const override { return is_staged_[record]; }
  // Throws std::logic_error for chunks of another size than the staged ones.
  std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                      std::span<const PayloadPiece> pieces) override {
    if (!std::ranges::equal(pieces_of(chunk, *this), pieces) || chunks_.at(chunk) == nullptr) {
      throw std::logic_error("staged with chunks of another size");
    }
    return std::make_unique<BorrowedPieces>(chunks_[chunk]->data());
  }

 private:
  std::vector<PayloadPiece> pieces_of(std::size_t chunk, const Stager& stager) const {
    const std::uint64_t begin = std::uint64_t{chunk} * chunk_nbytes_;
    return staged_pieces(layout_, stager, begin, std::min(begin + chunk_nbytes_, layout_.nbytes()));
  }

  const ArchiveLayout& layout_;
  std::unique_ptr<Stager> stager_;
  const std::size_t chunk_nbytes_;
  std::vector<bool> is_staged_;                        // by record
  std::vector<std::unique_ptr<StagedPieces>> chunks_;  // null for chunks without staged pieces
};

}  // namespace ptsave
