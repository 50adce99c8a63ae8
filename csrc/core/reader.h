// Reads an archive: parses it, and fills the payloads of many records at once into one region of
// memory that mirrors the file.
//
// Mirroring means that a payload's address and its position in the file are congruent modulo the
// page size, so that one large read takes many records with the seams between them, and local
// headers arrive for checking with the data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/archive.h"
#include "core/buffer.h"
#include "core/file.h"
#include "core/pipeline.h"

namespace ptsave {

// Where an archive's bytes come from: a part of a file, or memory.  Safe for concurrent use.
class ArchiveSource {
 public:
  // The archive is all of `file` from base_offset on.
  ArchiveSource(File file, std::uint64_t base_offset);
  // The bytes must outlive the source and stay unchanged.
  ArchiveSource(const std::byte* data, std::uint64_t nbytes, std::string name);

  const std::string& name() const { return name_; }
  std::uint64_t nbytes() const { return nbytes_; }
  // The archive's bytes, if they are in memory; else null.
  const std::byte* memory() const { return memory_; }
  void read_at(std::uint64_t offset, void* data, std::size_t nbytes) const;
  // Whether the page cache may hold some of these bytes.
  bool may_be_cached(std::uint64_t offset, std::size_t nbytes) const;
  // Reads what the page cache holds without waiting; how many bytes that was (possibly 0).
  std::size_t read_cached(std::uint64_t offset, void* data, std::size_t nbytes) const;
  // Reads whole pages past the page cache: offset, data and capacity are multiples of the page
  // size. Reads up to the end of the file if that comes first.  False where direct reads do not
  // work.
  bool read_direct(std::uint64_t offset, void* data, std::size_t nbytes) const;

 private:
  std::optional<File> file_;
  Descriptor direct_;
  const std::byte* memory_ = nullptr;
  std::uint64_t base_offset_ = 0;
  std::uint64_t nbytes_ = 0;
  std::string name_;
};

// What keeps loaded memory in place.  It counts its references itself, so that one of them is a
// single pointer: a torch storage has room for that much, a std::shared_ptr would need memory of
// its own for each storage.
class Owner {
 public:
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  void retain() noexcept { n_references_.fetch_add(1, std::memory_order_relaxed); }
  void release() noexcept {
    if (n_references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 protected:
  Owner() = default;
  virtual ~Owner() = default;

 private:
  std::atomic<std::size_t> n_references_{1};  // the maker's
};

// One reference to an owner, or none.
class OwnerReference {
 public:
  OwnerReference() = default;
  // Takes over the maker's reference.
  explicit OwnerReference(Owner* owner) : owner_(owner) {}
  OwnerReference(OwnerReference&& other) noexcept : owner_(other.detach()) {}
  OwnerReference(const OwnerReference& other) : owner_(other.owner_) {
    if (owner_ != nullptr) owner_->retain();
  }
  OwnerReference& operator=(OwnerReference other) noexcept {
    std::swap(owner_, other.owner_);
    return *this;
  }
  ~OwnerReference() {
    if (owner_ != nullptr) owner_->release();
  }

  // The caller releases it then.
  Owner* detach() { return std::exchange(owner_, nullptr); }

 private:
  Owner* owner_ = nullptr;
};

// A part of a mirrored region whose memory goes back to the system as one, when the last owner lets
// go.  Address space goes when the whole region does.
class Segment final : public Owner {
 public:
  Segment(std::shared_ptr<Mapping> region, std::size_t begin, std::size_t end)
      : region_(std::move(region)), begin_(begin), end_(end) {}

 private:
  ~Segment() override { region_->discard(begin_, end_); }

  std::shared_ptr<Mapping> region_;
  std::size_t begin_;
  std::size_t end_;
};

// A record's payload in memory and what keeps it there.  The bytes are writable.
struct LoadedPayload {
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  OwnerReference owner;
};

// A record whose bytes do not match its CRC.
struct DamagedRecord {
  std::string name;
  std::uint64_t payload_offset = 0;
  std::uint32_t expected_crc = 0;
  std::uint32_t actual_crc = 0;
};

// The central directory promised a payload where the local header puts none.  Reading again with
// exact_offsets resolves it.
class LayoutMismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Transfer;

class ArchiveReader {
 public:
  // Reads and parses the central directory.  FormatError, IoError.
  explicit ArchiveReader(ArchiveSource source);
  ~ArchiveReader();

  const ArchiveIndex& index() const { return index_; }
  const ArchiveSource& source() const { return source_; }

  // Where the payload of record i begins, from its local header.
  std::uint64_t payload_offset(std::size_t i) const;
  // The same for a record that is to be read: FormatError if it is not STORED.
  std::uint64_t stored_payload_offset(std::size_t i) const;
  // Reads the whole payload of record i, which begins at `offset`, as stored_payload_offset() says.
  // Verified if asked: FormatError.
  void read(std::size_t i, std::uint64_t offset, void* payload, bool verify) const;

  // Begins filling the payloads of `records` (indices; STORED only) in the background.  A second
  // call ends and replaces the first. With exact_offsets every local header is read first instead
  // of being checked on arrival.
  void start(const std::vector<std::size_t>& records, std::size_t n_threads, bool verify,
             bool exact_offsets);
  // Waits for the payload of record i (one of those started).  Damage is wait_all()'s to report.
  // IoError, LayoutMismatch.
  void wait(std::size_t i, const Poll& poll);
  // Waits for all; if any are damaged, returns them in file order.
  std::vector<DamagedRecord> wait_all(const Poll& poll);
  // The place of record i, which may still be being filled.
  LoadedPayload payload(std::size_t i) const;
  std::uint64_t nbytes_read() const;
  std::uint64_t nbytes_to_read() const;
  // Stops reading and waits for what is in flight.  Payloads stay as they are.
  void cancel();

 private:
  ArchiveSource source_;
  ArchiveIndex index_;
  std::unique_ptr<Transfer> transfer_;
};

}  // namespace ptsave
