// Writes a file chunk by chunk: a FileBody produces the bytes, and a ChunkSink takes them.
//
// An archive's body produces headers, payloads (checksummed on the way), descriptors, and the tail
// that depends on every CRC.
//
// A chunk that ends a record needs the whole record's CRC for the data descriptor.  All earlier
// chunks are done or in progress, so its worker can wait for their CRCs (not for their writes).
// Every byte of the file is produced once, and no byte is patched afterwards.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/format/archive.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"

namespace ptsave {

// A half-open range of positions in the file.
struct ByteRange {
  std::uint64_t begin;
  std::uint64_t end;

  std::uint64_t nbytes() const { return end - begin; }
  bool empty() const { return begin >= end; }
};

inline ByteRange intersect(ByteRange a, ByteRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Takes the bytes of one chunk, in file order.
class ChunkSink {
 public:
  virtual ~ChunkSink() = default;
  // Takes a piece of a payload, which stays valid until the chunk is done.  Returns `crc` continued
  // over it, or any value if checksums are off.
  virtual std::uint32_t put_payload(const std::byte* data, std::size_t nbytes,
                                    std::uint32_t crc) = 0;
  // Takes bytes that are valid only during the call.
  virtual void put_seam(const std::byte* data, std::size_t nbytes) = 0;
  virtual void put_hole(std::uint64_t nbytes) = 0;
};

// A file except its small tail, which is known when all else has been produced.
class FileBody {
 public:
  FileBody(std::uint64_t nbytes, std::size_t chunk_nbytes)
      : nbytes_(nbytes),
        chunk_nbytes_(chunk_nbytes),
        n_chunks_((nbytes + chunk_nbytes - 1) / chunk_nbytes) {}
  FileBody(const FileBody&) = delete;
  FileBody& operator=(const FileBody&) = delete;
  virtual ~FileBody() = default;

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
  // Makes the tail's parts that need no chunk, on a thread that would only wait.  Optional.
  virtual void prepare_tail() {}
  // The rest of the file; called when every chunk has been produced.
  virtual std::string tail() = 0;
  // Every payload's CRC; called after tail().
  virtual std::span<const std::uint32_t> crcs() = 0;

 private:
  const std::uint64_t nbytes_;
  const std::size_t chunk_nbytes_;
  const std::size_t n_chunks_;
};

// Returns the address of record i's payload; null for a hole (unwritten bytes with CRC 0: torch's
// skip_data).  Called for each piece of a payload, except empty ones, ones that a Stager brings,
// and the last record, `.data/serialization_id`, which is computed.  Workers call it concurrently.
// Without workers the waiting thread calls it in ascending order, so it may make one payload a
// call.
using Payloads = std::function<const std::byte*(std::size_t i)>;

// Collects the records' CRCs from chunks in any order.  Safe for concurrent use.
//
// A chunk boundary cuts at most one record, so a chunk has at most two partial CRCs: `entering` for
// a record that began in an earlier chunk, and `leaving` for a record that ends in a later one.
class RecordCrcs {
 public:
  // The first chunk begins at `origin`.
  RecordCrcs(const ArchiveLayout& layout, std::uint64_t origin, std::size_t n_chunks,
             std::size_t chunk_nbytes);

  // Records the CRC of record i's part in `chunk`.
  void add_piece(ChunkPipeline& pipeline, std::size_t chunk, std::size_t i, std::uint32_t crc);
  // Records that all of `chunk` has been checksummed.
  void complete(ChunkPipeline& pipeline, std::size_t chunk);
  // Returns record i's CRC to the worker of `chunk`, which has passed the record's payload.  Waits
  // for the earlier chunks that hold a part of the record.
  std::uint32_t record_crc(ChunkPipeline& pipeline, std::size_t chunk, std::size_t i);
  // Every record's CRC; valid when all chunks are complete.
  std::span<std::uint32_t> all() { return whole_; }

 private:
  enum State : std::uint8_t { kNone, kEntering, kComplete };
  struct Pieces {
    std::uint32_t entering = 0;
    std::uint32_t leaving = 0;
    std::atomic<std::uint8_t> state{kNone};
  };

  std::pair<std::size_t, std::size_t> chunks_of(const RecordLayout& record) const;
  std::uint32_t combine(const RecordLayout& record, std::size_t first, std::size_t last) const;
  void publish(ChunkPipeline& pipeline, std::size_t chunk, State state);
  void wait_for(ChunkPipeline& pipeline, std::size_t chunk, State state) const;

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

// The first records of a layout, from a position in the file on, which is position 0 of the body.
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
              const Payloads& payloads, Stager* stager, bool compute_crcs,
              std::size_t chunk_nbytes);

  void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) override;
  std::string tail() override { return {}; }
  std::span<const std::uint32_t> crcs() override { return crcs_.all(); }
  // Reads payloads in host memory through `arriving`.
  void follow(ArrivingPayloads* arriving) { arriving_ = arriving; }

 protected:
  const ArchiveLayout& layout() const { return layout_; }
  bool computes_crcs() const { return compute_crcs_; }
  std::span<std::uint32_t> record_crcs() { return crcs_.all(); }
  // See serialization_id().
  std::optional<std::uint32_t> lookalike(std::size_t record) const { return lookalikes_[record]; }

 private:
  class StagedCursor;

  void put_header(std::size_t i, ByteRange part, std::vector<std::byte>& scratch,
                  ChunkSink& sink) const;
  std::uint32_t put_payload(std::size_t i, ByteRange part, StagedCursor& staged, ChunkSink& sink);
  std::uint32_t put_arriving(std::size_t i, ByteRange part, const std::byte* payload,
                             ChunkSink& sink);
  void put_descriptor(std::size_t i, std::uint32_t crc, ByteRange part, ChunkSink& sink) const;

  const ArchiveLayout& layout_;
  const Part part_;
  const std::string front_;
  const Payloads& payloads_;
  Stager* const stager_;
  ArrivingPayloads* arriving_ = nullptr;
  const bool compute_crcs_;
  RecordCrcs crcs_;
  std::vector<std::optional<std::uint32_t>> lookalikes_;
};

// A whole archive.
class ArchiveBody final : public RecordsBody {
 public:
  ArchiveBody(const ArchiveLayout& layout, const Payloads& payloads, Stager* stager,
              bool compute_crcs, std::size_t chunk_nbytes);

  void prepare_tail() override;
  // The bytes from the last record (the serialization id) on.
  std::string tail() override;

 private:
  std::uint64_t names_hash_ = 0;
  std::string tail_;  // empty before prepare_tail()
};

}  // namespace ptsave
