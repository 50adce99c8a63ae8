// Reads an archive: parses it, and fills the payloads of many records at once into one region of
// memory that mirrors the file.
//
// Mirroring means that a payload's address and its position in the file are congruent modulo the
// page size, so that one large read takes many records with the seams between them, and local
// headers arrive for checking with the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/format/archive.h"
#include "core/io/source.h"
#include "core/pipeline/pipeline.h"
#include "core/read/region.h"
#include "core/read/scatter.h"
#include "core/read/transfer.h"

namespace ptsave {

class ArchiveReader {
 public:
  // Reads and parses the central directory.  FormatError, IoError.
  explicit ArchiveReader(ByteSource source);
  ~ArchiveReader();

  const ArchiveIndex& index() const { return index_; }
  const ByteSource& source() const { return source_; }
  // Reads the same bytes from another source from now on.  std::invalid_argument if they are not as
  // many.  Not while anything is being read.
  void exchange(ByteSource source);

  // Offset of the payload of record i, from its local header.
  std::uint64_t payload_offset(std::size_t i) const;
  // The same for a record that is to be read: FormatError if it is not STORED.
  std::uint64_t stored_payload_offset(std::size_t i) const;
  // Reads the whole payload of record i, which begins at `offset`, as stored_payload_offset() says.
  // Verified if asked: FormatError.
  void read(std::size_t i, std::uint64_t offset, void* payload, bool verify) const;

  // Reads `records` whole, in file order, and fills the destinations; damaged ones are returned in
  // file order.  Without destinations nothing is kept.  `unstager` is as for fill().  Does not
  // disturb the calls below, and is safe for concurrent use, as are all const functions.
  std::vector<DamagedRecord> read_records(std::vector<std::size_t> records,
                                          const std::vector<Destination>& destinations,
                                          std::size_t n_threads, bool verify, const Poll& poll,
                                          Unstager* unstager = nullptr) const;
  // Reads bytes of the archive as they are, by several threads if there are many.
  void read_range(std::uint64_t offset, std::byte* to, std::size_t nbytes, std::size_t n_threads,
                  const Poll& poll) const;

  // Begins filling the payloads of `records` (indices; STORED only) in the background.  A second
  // call ends and replaces the first. With exact_offsets every local header is read first instead
  // of being checked on arrival.
  void start(const std::vector<std::size_t>& records, std::size_t n_threads, bool verify,
             bool exact_offsets);
  // Gives the payloads of `records` their places as start() does, but reads nothing: until fill()
  // puts bytes there, they are zero and take no memory.
  void reserve(const std::vector<std::size_t>& records);
  // Reads records into memory that exists already; returns when all of them are there.  Records are
  // those that destinations name; damaged ones are returned in file order.  std::invalid_argument
  // for destinations that overlap in, or reach beyond, a payload.  The payloads that
  // reserve() has placed are not touched, unless they are the destination.
  // `unstager`, which may be null, is for destinations with targets; copies that it has been sent
  // may still be under way when this returns or throws.
  std::vector<DamagedRecord> fill(const std::vector<Destination>& destinations,
                                  std::size_t n_threads, bool verify, const Poll& poll,
                                  Unstager* unstager = nullptr);
  // The records of the last fill() whose destinations may have changed, in file order; all of them
  // if it has returned.
  std::vector<std::size_t> begun() const;
  // Waits for the payload of record i (one of those started).  Damage is wait_all()'s to report.
  // IoError, LayoutMismatch.
  void wait(std::size_t i, const Poll& poll);
  // Waits for all; if any are damaged, returns them in file order.
  std::vector<DamagedRecord> wait_all(const Poll& poll);
  // The place of record i, one of those started or reserved; it may still be being filled.
  LoadedPayload payload(std::size_t i) const;
  // Gives the memory of record i's place back, but for parts of pages.
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
