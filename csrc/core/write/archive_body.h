// The bytes of an archive that is being written, chunk by chunk: headers, payloads (checksummed on
// the way), descriptors and, at the end, the tail that depends on every CRC.
//
// A chunk that ends a record needs the CRC of the whole record for the data descriptor.  The chunks
// before it are done or being worked on, so its worker waits for their CRCs (not for their writes):
// every byte of the file is produced once and nothing is patched afterwards.
#pragma once

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
#include "core/write/file_body.h"

namespace ptsave {

// Address of the payload of record i of a layout; null for a hole (bytes that are left unwritten,
// and have CRC 0: torch's skip_data).  Called for each piece of a payload, but never for one that a
// Stager brings, for an empty one, or for the last record, `.data/serialization_id`, which is
// computed.  Called by the workers; with no workers on the waiting thread and in ascending order,
// so that it may then make one payload at a time.
using Payloads = std::function<const std::byte*(std::size_t i)>;

// The records' CRCs while chunks are being worked on in any order.  Safe for concurrent use.
//
// A chunk boundary cuts at most one record, so a chunk holds at most two partial CRCs: of the
// record that enters it from before, and of the one that leaves it at its end.
class RecordCrcs {
 public:
  // The first chunk begins at `origin`.
  RecordCrcs(const ArchiveLayout& layout, std::uint64_t origin, std::size_t n_chunks,
             std::size_t chunk_nbytes);

  // The CRC of the part of record i that lies in `chunk`.
  void add_piece(ChunkPipeline& pipeline, std::size_t chunk, std::size_t i, std::uint32_t crc);
  // All of `chunk` has been checksummed.
  void complete(ChunkPipeline& pipeline, std::size_t chunk);
  // The CRC of record i, for the worker of `chunk`, which has passed the record's payload.  Waits
  // for earlier chunks where the record began in one.
  std::uint32_t record_crc(ChunkPipeline& pipeline, std::size_t chunk, std::size_t i);
  // Every record's CRC, once all chunks are complete.
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
  // Where the payload of a record ends in its last chunk.
  std::uint64_t end_in_last_chunk(const RecordLayout& record, std::size_t last) const {
    return record.payload_end() - origin_ - last * chunk_nbytes_;
  }

  const ArchiveLayout& layout_;
  const std::uint64_t origin_;
  const std::size_t chunk_nbytes_;
  std::vector<std::uint32_t> whole_;
  std::vector<Pieces> pieces_;
};

// The first records of a layout, from a position of the file on: the positions of a body are
// relative to that.
class RecordsBody : public FileBody {
 public:
  // The part [begin, end) of the file, in which the first `n_records` records are.
  struct Part {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t n_records = 0;
  };

  // `front` are bytes of the part in front of the first record.  `stager` may be null: then all
  // payloads are in host memory.
  RecordsBody(const ArchiveLayout& layout, const Part& part, std::string front,
              const Payloads& payloads, Stager* stager, bool compute_crcs,
              std::size_t chunk_nbytes);

  void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) override;
  std::string tail() override { return {}; }
  std::span<const std::uint32_t> crcs() override { return crcs_.all(); }
  // Payloads in host memory are read through this.
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
  // From the last record (the serialization id) on.
  std::string tail() override;

 private:
  std::uint64_t names_hash_ = 0;
  std::string tail_;  // empty until it is prepared
};

}  // namespace ptsave
