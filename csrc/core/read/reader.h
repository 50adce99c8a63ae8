// Parses an archive, and reads payloads of many records into one region that mirrors the file.
//
// In a mirror, a payload's address and its position in the file are congruent modulo the page size.
// So one large read takes many records and the seams between them.  Local headers arrive with the
// data, and can be checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/owner.h"
#include "core/format/archive.h"
#include "core/io/source.h"
#include "core/memory/buffer.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"

namespace ptsave {

// Separates the records of an archive that hold storages, data/<key>, from all others.  Not for
// concurrent use.
class DataRecords {
 public:
  // `index` must outlive this object.
  explicit DataRecords(const ArchiveIndex& index);

  // Numbers of records, in the index's order.
  const std::vector<std::size_t>& storages() const { return storages_; }
  const std::vector<std::size_t>& others() const { return others_; }
  // Whether storages can be verified: torch writes either all storages' CRCs or zero for all.
  bool have_crcs() const;
  // The record data/<key>, or ArchiveIndex::kNotFound.  Fast for keys in the records' order, as in
  // most pickles.
  std::size_t find(std::string_view key);

 private:
  const ArchiveIndex& index_;
  std::vector<std::size_t> storages_;
  std::vector<std::size_t> others_;
  std::size_t last_found_ = ArchiveIndex::kNotFound;
};

// A record whose bytes do not match its CRC.
struct DamagedRecord {
  std::string name;
  std::uint64_t payload_offset = 0;
  std::uint32_t expected_crc = 0;
  std::uint32_t actual_crc = 0;
};

// The central directory and a local header disagree about a payload's place.  Reading again with
// exact_offsets resolves it.
class LayoutMismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A record's payload in memory and the owner of that memory.  The bytes are writable.
struct LoadedPayload {
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  OwnerReference owner;
};

// The largest chunk is one huge page, so that no two threads fault in the same huge page.
inline constexpr std::size_t kMaxChunkNbytes = kHugePageNbytes;

// A part of a record's payload and the memory it belongs in.  `target` is the number of an
// Unstager's target; with it, `place` is not accessed and only identifies the memory.
struct Destination {
  std::size_t record = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
  std::optional<std::size_t> target = std::nullopt;
};

// Returns destinations that put the whole payload of records[k] into memory[k].  Without memory,
// returns none.  Throws std::invalid_argument if the sizes differ.
std::vector<Destination> whole_payloads(const ArchiveIndex& index,
                                        std::span<const std::size_t> records,
                                        std::span<const std::span<std::byte>> memory);

class Region;
class Transfer;
struct TransferPlan;

class ArchiveReader {
 public:
  // Reads and parses the central directory.  Throws FormatError, IoError.
  explicit ArchiveReader(ByteSource source);
  ~ArchiveReader();

  const ArchiveIndex& index() const { return index_; }
  const ByteSource& source() const { return source_; }
  // Reads the same archive from another source from now on.  Must not be called during a read.
  // Throws std::invalid_argument if the sizes differ.
  void exchange(ByteSource source);

  // Offset of the payload of record i, from its local header.
  std::uint64_t payload_offset(std::size_t i) const;
  // The same, but throws FormatError for a record that is not STORED.
  std::uint64_t stored_payload_offset(std::size_t i) const;
  // Reads the whole payload of record i from `offset`, its stored_payload_offset().  With `verify`,
  // throws FormatError for a wrong CRC.
  void read(std::size_t i, std::uint64_t offset, void* payload, bool verify) const;

  // Reads whole records in file order, fills the destinations, and returns damaged records in file
  // order.  Without destinations, only checks.  `unstager` is as for fill().  Does not affect the
  // calls below.  Like all const functions, it is safe for concurrent use.
  std::vector<DamagedRecord> read_records(std::vector<std::size_t> records,
                                          const std::vector<Destination>& destinations,
                                          std::size_t n_threads, bool verify, const Poll& poll,
                                          Unstager* unstager = nullptr) const;
  // Reads a range of the archive's bytes, by several threads if it is large.
  void read_range(std::uint64_t offset, std::byte* to, std::size_t nbytes, std::size_t n_threads,
                  const Poll& poll) const;

  // Begins reading the payloads of `records` (indices; STORED only) in the background, and ends an
  // earlier start().  With exact_offsets, reads every local header first instead of checking it on
  // arrival.
  void start(const std::vector<std::size_t>& records, std::size_t n_threads, bool verify,
             bool exact_offsets);
  // Gives the payloads of `records` places as start() does, but reads nothing: until fill() puts
  // bytes there, they are zero and take no memory.
  void reserve(const std::vector<std::size_t>& records);
  // Reads the destinations' records into existing memory, and returns damaged records in file order
  // when all have arrived.  Throws std::invalid_argument for destinations that overlap in a payload
  // or reach beyond it.  Payloads placed by reserve() change only if they are a destination.
  // Destinations with targets need an `unstager`; its copies may still be in flight when this
  // returns or throws.
  std::vector<DamagedRecord> fill(const std::vector<Destination>& destinations,
                                  std::size_t n_threads, bool verify, const Poll& poll,
                                  Unstager* unstager = nullptr);
  // The records of the last fill() whose destinations may have changed, in file order: all records
  // if fill() has returned.
  std::vector<std::size_t> begun() const;
  // Waits for a started record; only wait_all() reports damage.  Throws IoError, LayoutMismatch.
  void wait(std::size_t i, const Poll& poll);
  // Waits for all records, and returns damaged ones in file order.
  std::vector<DamagedRecord> wait_all(const Poll& poll);
  // The place of a started or reserved record, which may still be filling.
  LoadedPayload payload(std::size_t i) const;
  // Returns the memory of record i's place to the system, except parts of pages.
  void discard(std::size_t i) const;
  std::uint64_t nbytes_read() const;
  std::uint64_t nbytes_to_read() const;
  // Stops reading and waits for reads in flight.  Payloads stay as they are.
  void cancel();

 private:
  std::shared_ptr<const TransferPlan> plan(const std::vector<std::size_t>& records,
                                           bool exact_offsets) const;

  ByteSource source_;
  ArchiveIndex index_;
  std::shared_ptr<Region> region_;
  std::unique_ptr<Transfer> transfer_;
};

}  // namespace ptsave
