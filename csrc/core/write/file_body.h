// Writes a file chunk by chunk: a FileBody produces the bytes, and a ChunkSink takes them.
//
// An archive's body produces headers, payloads (checksummed on the way), descriptors, and the tail
// that depends on every CRC.
//
// A chunk that ends a record needs the whole record's CRC for the data descriptor.  All earlier
// chunks are done or in progress, so its worker can wait for their CRCs (not for their writes).
// Every byte of the file is produced once.  No byte is patched afterwards, except the checksums in
// the header of a packed file.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/owner.h"
#include "core/crc/crc32.h"
#include "core/format/archive.h"
#include "core/memory/pages.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"

namespace ptsave {

// A half-open range of positions in the file.
struct ByteRange {
  std::uint64_t begin;
  std::uint64_t end;

  std::uint64_t nbytes() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool operator==(const ByteRange&) const = default;
};

inline ByteRange intersect(ByteRange a, ByteRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Takes the bytes of one chunk, in file order.
class ChunkSink : public Interface {
 public:
  // Takes a piece of a payload, which stays valid until the chunk is done.  Returns `crc` continued
  // over it, or any value if checksums are off.
  virtual std::uint32_t put_payload(const std::byte* data, std::size_t nbytes,
                                    std::uint32_t crc) = 0;
  // Takes bytes that are valid only during the call.
  virtual void put_seam(const std::byte* data, std::size_t nbytes) = 0;
  virtual void put_hole(std::uint64_t nbytes) = 0;
};

// Produces a file except its small tail, which depends on all other bytes.
class FileBody : public Interface {
 public:
  FileBody(std::uint64_t nbytes, std::size_t chunk_nbytes)
      : nbytes_(nbytes),
        chunk_nbytes_(chunk_nbytes),
        n_chunks_((nbytes + chunk_nbytes - 1) / chunk_nbytes) {}

  std::uint64_t nbytes() const { return nbytes_; }
  std::size_t chunk_nbytes() const { return chunk_nbytes_; }
  std::size_t n_chunks() const { return n_chunks_; }
  ByteRange chunk_range(std::size_t chunk) const {
    const std::uint64_t begin = std::uint64_t{chunk} * chunk_nbytes_;
    return {begin, std::min<std::uint64_t>(begin + chunk_nbytes_, nbytes_)};
  }

  // Hands the bytes of `chunk` to `sink`.  Call once for each chunk; safe for concurrent use on
  // different chunks of one pipeline.
  virtual void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) = 0;
  // Optional: prepares the parts of the tail that need no chunk, on a thread that would otherwise
  // wait.
  virtual void prepare_tail() {}
  // The rest of the file; called when every chunk has been produced.
  virtual std::string tail() = 0;
  // Every payload's CRC; called after tail().
  virtual std::span<const std::uint32_t> crcs() = 0;
  // Bytes that replace others, because they depend on the CRCs; called after tail().
  struct Patch {
    std::uint64_t offset = 0;
    std::string bytes;
  };
  virtual Patch patch() { return {}; }

 private:
  const std::uint64_t nbytes_;
  const std::size_t chunk_nbytes_;
  const std::size_t n_chunks_;
};

// Returns the address of record i's payload; null for a hole (unwritten bytes with CRC 0: torch's
// skip_data).  Called for each piece of a payload, except empty payloads, payloads that a Stager
// brings, and the last record, `.data/serialization_id`, which is computed.  Workers call it
// concurrently.  Without workers the waiting thread calls it in ascending order, so the function
// may make one payload per call.
using Payloads = std::function<const std::byte*(std::size_t i)>;

// Collects the records' CRCs from chunks in any order.  Safe for concurrent use.
//
// A chunk boundary cuts at most one record, so a chunk has at most two partial CRCs: `entering` for
// a record that began in an earlier chunk, and `leaving` for a record that ends in a later one.
class RecordCrcs {
 public:
  // The first chunk begins at `origin`.
  RecordCrcs(const ArchiveLayout& layout, std::uint64_t origin, std::size_t n_chunks,
             std::size_t chunk_nbytes)
      : layout_(layout),
        origin_(origin),
        chunk_nbytes_(chunk_nbytes),
        whole_(layout.size()),
        pieces_(n_chunks) {}

  // Records the CRC of record i's part in `chunk`.
  void add_piece(ChunkPipeline& pipeline, std::size_t chunk, std::size_t i, std::uint32_t crc) {
    const auto [first, last] = chunks_of(layout_.record(i));
    if (first == last) {
      whole_[i] = crc;
    } else if (chunk == first) {
      pieces_[chunk].leaving = crc;
    } else {
      pieces_[chunk].entering = crc;
      publish(pipeline, chunk, kEntering);
    }
  }

  // Records that all of `chunk` has been checksummed.
  void complete(ChunkPipeline& pipeline, std::size_t chunk) { publish(pipeline, chunk, kComplete); }
  // Returns record i's CRC to the worker of `chunk`, which has passed the record's payload.  Waits
  // for the earlier chunks that hold a part of the record.
  std::uint32_t record_crc(ChunkPipeline& pipeline, std::size_t chunk, std::size_t i) {
    const RecordLayout& record = layout_.record(i);
    const auto [first, last] = chunks_of(record);
    if (first == last) {
      if (first < chunk) wait_for(pipeline, first, kComplete);
      return whole_[i];
    }
    for (std::size_t c = first; c < last; ++c) wait_for(pipeline, c, kComplete);
    wait_for(pipeline, last, kEntering);
    const std::uint32_t crc = combine(record, first, last);
    // A chunk boundary may cut the descriptor; only one of the two chunks records the CRC.
    if (chunk_at(record.payload_end()) == chunk) whole_[i] = crc;
    return crc;
  }

  // Every record's CRC; valid when all chunks are complete.
  std::span<std::uint32_t> all() { return whole_; }

 private:
  enum State : std::uint8_t { kNone, kEntering, kComplete };
  struct Pieces {
    std::uint32_t entering = 0;
    std::uint32_t leaving = 0;
    std::atomic<std::uint8_t> state{kNone};
  };

  std::pair<std::size_t, std::size_t> chunks_of(const RecordLayout& record) const {
    return {chunk_at(record.payload_offset), chunk_at(record.payload_end() - 1)};
  }
  std::uint32_t combine(const RecordLayout& record, std::size_t first, std::size_t last) const {
    std::uint32_t crc = pieces_[first].leaving;
    for (std::size_t c = first + 1; c < last; ++c) {
      crc = crc32_combine(crc, pieces_[c].entering, chunk_nbytes_);
    }
    return crc32_combine(crc, pieces_[last].entering, end_in_last_chunk(record, last));
  }
  void publish(ChunkPipeline& pipeline, std::size_t chunk, State state) {
    pieces_[chunk].state.store(state, std::memory_order_release);
    pipeline.notify();
  }
  void wait_for(ChunkPipeline& pipeline, std::size_t chunk, State state) const {
    const auto ready = [&] {
      return pieces_[chunk].state.load(std::memory_order_acquire) >= state;
    };
    if (!ready()) pipeline.wait_in_worker(ready);
  }

  std::size_t chunk_at(std::uint64_t offset) const { return (offset - origin_) / chunk_nbytes_; }
  // The end of a record's payload, relative to its last chunk.
  std::uint64_t end_in_last_chunk(const RecordLayout& record, std::size_t last) const {
    return record.payload_end() - origin_ - last * chunk_nbytes_;
  }

  const ArchiveLayout& layout_;
  const std::uint64_t origin_;
  const std::size_t chunk_nbytes_;
  std::vector<std::uint32_t> whole_;
  std::vector<Pieces> pieces_;
};

inline constexpr std::uint64_t kFrontNbytes = 8;  // the bytes that descriptor_lookalike() needs

// The pieces to stage for the bytes [begin, end) of the archive, in file order.  A payload's first
// piece has the 8 bytes that descriptor_lookalike() needs, even if the chunk ends earlier.
inline std::vector<PayloadPiece> staged_pieces(const ArchiveLayout& layout, const Stager& stager,
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

// The maximum number of bytes in staged_pieces() of a chunk.
inline std::size_t max_staged_nbytes(std::size_t chunk_nbytes) {
  return chunk_nbytes + kFrontNbytes;
}

// The staged payloads of one chunk, one directly behind the other.
class StagedCursor {
 public:
  StagedCursor(const ArchiveLayout& layout, Stager* stager, std::size_t chunk, ByteRange range) {
    if (stager == nullptr) return;
    pieces_ = staged_pieces(layout, *stager, range.begin, range.end);
    if (pieces_.empty()) return;
    staged_ = stager->stage(chunk, pieces_);
    at_ = staged_->data();
  }

  // Returns the next piece if it belongs to this record, else nothing.
  std::span<const std::byte> next(std::size_t record) {
    if (done_ == pieces_.size() || pieces_[done_].record != record) return {};
    const std::size_t nbytes = pieces_[done_++].nbytes;
    return {std::exchange(at_, at_ + nbytes), nbytes};
  }

 private:
  std::vector<PayloadPiece> pieces_;
  std::unique_ptr<StagedPieces> staged_;
  std::size_t done_ = 0;
  const std::byte* at_ = nullptr;
};

// The first records of a layout.  Position 0 of the body is position `part.begin` of the file.
class RecordsBody : public FileBody {
 public:
  // The part [begin, end) of the file, which holds the first `n_records` records.
  struct Part {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t n_records = 0;
  };

  // `front` are bytes in front of the first record.  `stager` may be null for payloads in host
  // memory.
  RecordsBody(const ArchiveLayout& layout, const Part& part, std::string front,
              const Payloads& payloads, Stager* stager, bool compute_crcs, std::size_t chunk_nbytes)
      : FileBody(part.end - part.begin, chunk_nbytes),
        part_(part),
        front_(std::move(front)),
        payloads_(payloads),
        stager_(stager),
        layout_(layout),
        compute_crcs_(compute_crcs),
        crcs_(layout, part.begin, n_chunks(), chunk_nbytes),
        lookalikes_(layout.size()) {}

  void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) override {
    const ByteRange relative = chunk_range(chunk);
    const ByteRange range{part_.begin + relative.begin, part_.begin + relative.end};
    StagedCursor staged(layout_, stager_, chunk, range);
    if (chunk == 0 && !front_.empty()) {
      sink.put_seam(reinterpret_cast<const std::byte*>(front_.data()), front_.size());
    }
    std::vector<std::byte> scratch;
    for (std::size_t i = layout_.first_record_after(range.begin); i < part_.n_records; ++i) {
      const RecordLayout& record = layout_.record(i);
      if (record.header_offset >= range.end) break;
      put_header(i, intersect(range, {record.header_offset, record.payload_offset}), scratch, sink);
      const ByteRange payload = intersect(range, {record.payload_offset, record.payload_end()});
      if (!payload.empty())
        crcs_.add_piece(pipeline, chunk, i, put_payload(i, payload, staged, sink));
      const ByteRange descriptor = intersect(range, {record.payload_end(), record.end()});
      if (!descriptor.empty()) {
        put_descriptor(i, crcs_.record_crc(pipeline, chunk, i), descriptor, sink);
      }
    }
    crcs_.complete(pipeline, chunk);
  }

  std::string tail() override { return {}; }
  std::span<const std::uint32_t> crcs() override { return crcs_.all(); }
  // Reads payloads in host memory through `arriving`.
  void follow(ArrivingPayloads* arriving) { arriving_ = arriving; }

 private:
  void put_header(std::size_t i, ByteRange part, std::vector<std::byte>& scratch,
                  ChunkSink& sink) const {
    if (part.empty()) return;
    const RecordLayout& record = layout_.record(i);
    scratch.resize(record.payload_offset - record.header_offset);
    layout_.local_header(i, scratch.data());
    sink.put_seam(scratch.data() + (part.begin - record.header_offset), part.nbytes());
  }
  std::uint32_t put_payload(std::size_t i, ByteRange part, StagedCursor& staged, ChunkSink& sink) {
    const RecordLayout& record = layout_.record(i);
    std::span<const std::byte> data = staged.next(i);
    if (data.empty()) {
      const std::byte* const payload = payloads_(i);
      if (payload == nullptr) {
        sink.put_hole(part.nbytes());
        return 0;
      }
      if (arriving_ != nullptr) return put_arriving(i, part, payload, sink);
      data = std::span(payload, record.nbytes).subspan(part.begin - record.payload_offset);
    }
    if (part.begin == record.payload_offset) lookalikes_[i] = descriptor_lookalike(data);
    const std::uint32_t crc = sink.put_payload(data.data(), part.nbytes(), 0);
    return compute_crcs_ ? crc : 0;
  }

  std::uint32_t put_arriving(std::size_t i, ByteRange part, const std::byte* payload,
                             ChunkSink& sink) {
    const RecordLayout& record = layout_.record(i);
    if (part.begin == record.payload_offset) {
      std::array<std::byte, kFrontNbytes> front{};
      const std::span<std::byte> seen(front.data(),
                                      std::min<std::uint64_t>(front.size(), record.nbytes));
      arriving_->peek(payload, seen);
      lookalikes_[i] = descriptor_lookalike(seen);
    }
    std::uint32_t crc = 0;
    arriving_->read(payload + (part.begin - record.payload_offset), part.nbytes(),
                    [&](std::span<const std::byte> bytes) {
                      crc = sink.put_payload(bytes.data(), bytes.size(), crc);
                    });
    return compute_crcs_ ? crc : 0;
  }

  void put_descriptor(std::size_t i, std::uint32_t crc, ByteRange part, ChunkSink& sink) const {
    std::array<std::byte, 24> descriptor{};
    layout_.data_descriptor(i, crc, descriptor.data());
    sink.put_seam(descriptor.data() + (part.begin - layout_.record(i).payload_end()),
                  part.nbytes());
  }

  const Part part_;
  const std::string front_;
  const Payloads& payloads_;
  Stager* const stager_;
  ArrivingPayloads* arriving_ = nullptr;

 protected:
  const ArchiveLayout& layout_;
  const bool compute_crcs_;
  RecordCrcs crcs_;
  std::vector<std::optional<std::uint32_t>> lookalikes_;  // see serialization_id()
};

// A whole archive.
class ArchiveBody final : public RecordsBody {
 public:
  ArchiveBody(const ArchiveLayout& layout, const Payloads& payloads, Stager* stager,
              bool compute_crcs, std::size_t chunk_nbytes)
      : RecordsBody(layout, {0, layout.record(layout.size() - 1).header_offset, layout.size() - 1},
                    {}, payloads, stager, compute_crcs, chunk_nbytes) {}

  void prepare_tail() override {
    const std::size_t last = layout_.size() - 1;
    std::vector<std::string_view> names(last);
    for (std::size_t i = 0; i < last; ++i) names[i] = layout_.name(i);
    names_hash_ = hash_names(names);
    tail_.resize(layout_.nbytes() - nbytes());
    auto* const out = reinterpret_cast<std::byte*>(tail_.data());
    layout_.local_header(last, out);
    layout_.central_directory(out + (layout_.central_directory_offset() - nbytes()));
  }

  // The bytes from the last record (the serialization id) on.
  std::string tail() override {
    if (tail_.empty()) prepare_tail();
    const std::size_t last = layout_.size() - 1;
    const std::span<std::uint32_t> crcs = crcs_.all();
    std::vector<std::uint32_t> folded;
    for (std::size_t i = 0; i < last; ++i) {
      if (layout_.record(i).nbytes == 0) continue;
      if (const auto number = lookalikes_[i]) folded.push_back(*number);
      folded.push_back(crcs[i]);
    }
    const std::string id = serialization_id(names_hash_, folded);
    crcs[last] = compute_crcs_ ? crc32(0, id.data(), id.size()) : 0;

    auto* const out = reinterpret_cast<std::byte*>(tail_.data());
    const RecordLayout& record = layout_.record(last);
    std::memcpy(out + (record.payload_offset - nbytes()), id.data(), id.size());
    layout_.data_descriptor(last, crcs[last], out + (record.payload_end() - nbytes()));
    layout_.set_central_crcs(crcs, out + (layout_.central_directory_offset() - nbytes()));
    return std::move(tail_);
  }

 private:
  std::uint64_t names_hash_ = 0;
  std::string tail_;  // empty before prepare_tail()
};

// A header and payloads, one directly behind the other, like a safetensors file.
class PackedBody final : public FileBody {
 public:
  // The size of a CRC in the header: hexadecimal digits.
  static constexpr std::size_t kCrcNbytes = 8;

  // `payload_nbytes` are the payloads' sizes; `stager` brings all of them.  Header, sizes and
  // stager must outlive the body.  `crcs_at` is the place of the payloads' CRCs in the header, if
  // it has them.
  PackedBody(const std::string& header, std::span<const std::uint64_t> payload_nbytes,
             Stager& stager, bool compute_crcs, std::size_t chunk_nbytes,
             std::optional<std::uint64_t> crcs_at = std::nullopt)
      : FileBody(std::accumulate(payload_nbytes.begin(), payload_nbytes.end(),
                                 std::uint64_t{header.size()}),
                 chunk_nbytes),
        header_(header),
        stager_(stager),
        compute_crcs_(compute_crcs),
        crcs_at_(crcs_at),
        pieces_(n_chunks()),
        crcs_(payload_nbytes.size()) {
    std::uint64_t end = header.size();
    ends_.reserve(payload_nbytes.size());
    for (const std::uint64_t nbytes : payload_nbytes) ends_.push_back(end += nbytes);
  }

  void produce(ChunkPipeline& /*pipeline*/, std::size_t chunk, ChunkSink& sink) override {
    const ByteRange header = intersect(chunk_range(chunk), {0, header_.size()});
    if (!header.empty()) {
      sink.put_seam(reinterpret_cast<const std::byte*>(header_.data()) + header.begin,
                    header.nbytes());
    }
    const std::vector<PayloadPiece> pieces = pieces_of(chunk);
    if (pieces.empty()) return;
    std::unique_ptr<StagedPieces> staged;
    if (arriving_ == nullptr) staged = stager_.stage(chunk, pieces);
    const std::byte* data = staged != nullptr ? staged->data() : nullptr;
    for (const PayloadPiece& piece : pieces) {
      std::uint32_t crc = 0;
      const auto use = [&](std::span<const std::byte> bytes) {
        crc = sink.put_payload(bytes.data(), bytes.size(), crc);
      };
      if (staged != nullptr) {
        use({data, piece.nbytes});
        data += piece.nbytes;
      } else {
        arriving_->read(stager_.in_memory(piece), piece.nbytes, use);
      }
      if (compute_crcs_) pieces_[chunk].push_back({piece.record, piece.nbytes, crc});
    }
  }

  std::string tail() override {
    for (const std::vector<PieceCrc>& chunk : pieces_) {
      for (const auto& [payload, nbytes, crc] : chunk) {
        crcs_[payload] = crc32_combine(crcs_[payload], crc, nbytes);
      }
    }
    return {};
  }
  std::span<const std::uint32_t> crcs() override { return crcs_; }
  Patch patch() override {
    if (!crcs_at_) return {};
    static constexpr std::string_view kDigits = "0123456789abcdef";
    std::string digits;
    digits.reserve(crcs_.size() * kCrcNbytes);
    for (const std::uint32_t crc : crcs_) {
      for (int shift = 28; shift >= 0; shift -= 4) digits += kDigits[(crc >> shift) & 15];
    }
    return {*crcs_at_, std::move(digits)};
  }
  // Reads all payloads, which must be in host memory, through `arriving`.
  void follow(ArrivingPayloads* arriving) { arriving_ = arriving; }

 private:
  // The CRC of a payload's part in a chunk.
  struct PieceCrc {
    std::size_t payload;
    std::uint64_t nbytes;
    std::uint32_t crc;
  };

  std::vector<PayloadPiece> pieces_of(std::size_t chunk) const {
    const ByteRange range = chunk_range(chunk);
    std::vector<PayloadPiece> pieces;
    const auto first = std::ranges::upper_bound(ends_, range.begin);
    for (auto i = static_cast<std::size_t>(first - ends_.begin()); i < ends_.size(); ++i) {
      const ByteRange payload{i == 0 ? header_.size() : ends_[i - 1], ends_[i]};
      if (payload.begin >= range.end) break;
      const ByteRange part = intersect(range, payload);
      if (!part.empty()) pieces.push_back({i, part.begin - payload.begin, part.nbytes()});
    }
    return pieces;
  }

  const std::string& header_;
  Stager& stager_;
  ArrivingPayloads* arriving_ = nullptr;
  const bool compute_crcs_;
  const std::optional<std::uint64_t> crcs_at_;
  std::vector<std::uint64_t> ends_;            // of the payloads, in the file
  std::vector<std::vector<PieceCrc>> pieces_;  // by chunk
  std::vector<std::uint32_t> crcs_;
};

// Cuts bytes into blocks and records their checksums.
class CheckedSink {
 public:
  // `offset` is the beginning of a block.
  CheckedSink(ChunkSink& sink, std::uint64_t offset, std::vector<std::uint32_t>& crcs)
      : sink_(sink), at_(offset), crcs_(crcs) {}

  void put(const std::byte* data, std::uint64_t nbytes) {
    while (nbytes > 0) {
      const std::uint64_t n = std::min(nbytes, kCheckedBlockNbytes - at_ % kCheckedBlockNbytes);
      crc_ = sink_.put_payload(data, n, crc_);
      at_ += n;
      data += n;
      nbytes -= n;
      if (at_ % kCheckedBlockNbytes == 0) {
        crcs_[at_ / kCheckedBlockNbytes - 1] = crc_;
        crc_ = 0;
      }
    }
  }
  void put_zeros_until(std::uint64_t end) {
    static constexpr std::array<std::byte, kCheckedBlockNbytes> kZeros{};
    while (at_ < end) put(kZeros.data(), std::min(end - at_, kCheckedBlockNbytes));
  }

 private:
  ChunkSink& sink_;
  std::uint64_t at_;
  std::uint32_t crc_ = 0;
  std::vector<std::uint32_t>& crcs_;
};

// Bytes at a position in the file; without `data`, the stager brings them by the piece's
// number.
struct PlacedPiece {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  const std::byte* data = nullptr;

  std::uint64_t end() const { return offset + nbytes; }
};

// The blocks of a file, with zeros between its pieces.  The tail is the table of the blocks'
// checksums, so that any part can be read and checked alone.
class CheckedBody final : public FileBody {
 public:
  // Pieces are in the order of their offsets, without overlaps; chunks are whole blocks. Pieces
  // and stager, which may be null, must outlive the body.
  CheckedBody(std::span<const PlacedPiece> pieces, Stager* stager, std::size_t chunk_nbytes)
      : FileBody(nbytes_of(pieces), chunk_nbytes),
        pieces_(pieces),
        stager_(stager),
        crcs_(nbytes() / kCheckedBlockNbytes) {}

  // Size of the blocks that hold all pieces.
  static std::uint64_t nbytes_of(std::span<const PlacedPiece> pieces) {
    return pieces.empty() ? 0 : align_up(pieces.back().end(), kCheckedBlockNbytes);
  }

  void produce(ChunkPipeline& /*pipeline*/, std::size_t chunk, ChunkSink& sink) override {
    const ByteRange range = chunk_range(chunk);
    const std::vector<std::size_t> found = pieces_of(range);
    const auto part_of = [&](std::size_t i) {
      return intersect(range, {pieces_[i].offset, pieces_[i].end()});
    };
    std::vector<PayloadPiece> to_stage;
    for (const std::size_t i : found) {
      const ByteRange part = part_of(i);
      if (pieces_[i].data == nullptr) {
        to_stage.push_back({i, part.begin - pieces_[i].offset, part.nbytes()});
      }
    }
    std::unique_ptr<StagedPieces> staged;
    if (!to_stage.empty()) staged = stager_->stage(chunk, to_stage);
    const std::byte* next = staged ? staged->data() : nullptr;
    CheckedSink out(sink, range.begin, crcs_);
    for (const std::size_t i : found) {
      const ByteRange part = part_of(i);
      out.put_zeros_until(part.begin);
      if (pieces_[i].data != nullptr) {
        out.put(pieces_[i].data + (part.begin - pieces_[i].offset), part.nbytes());
      } else {
        out.put(next, part.nbytes());
        next += part.nbytes();
      }
    }
    out.put_zeros_until(range.end);
  }

  // All supported machines are little-endian.
  std::string tail() override {
    return {reinterpret_cast<const char*>(crcs_.data()), crcs_.size() * sizeof(std::uint32_t)};
  }
  // The CRCs of the blocks.
  std::span<const std::uint32_t> crcs() override { return crcs_; }

 private:
  std::vector<std::size_t> pieces_of(ByteRange range) const {
    std::vector<std::size_t> found;
    const auto first = std::ranges::upper_bound(pieces_, range.begin, {}, &PlacedPiece::end);
    for (auto i = static_cast<std::size_t>(first - pieces_.begin());
         i < pieces_.size() && pieces_[i].offset < range.end; ++i) {
      if (pieces_[i].nbytes > 0) found.push_back(i);
    }
    return found;
  }

  const std::span<const PlacedPiece> pieces_;
  Stager* const stager_;
  std::vector<std::uint32_t> crcs_;
};

}  // namespace ptsave
