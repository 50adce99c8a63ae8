// torch's archive conventions on top of zip: the place of every byte of a `.pt` file, planned or
// parsed.  Pure functions of bytes and numbers: no files, no threads, no global state.
//
// A record's *name* is given without the archive's root folder ("data/0", not "model/data/0").
// Offsets are absolute within the archive.  docs/format.md describes the layout.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ptsave {

// ---------------------------------------------------------------------------------------- writing

struct RecordSpec {
  std::string name;
  std::uint64_t nbytes;
  std::uint64_t alignment = 1;  // of its payload; used if it is a multiple of the archive's
};

// Offsets of a record's local header, payload and data descriptor (an empty record has none).
struct RecordLayout {
  std::uint64_t header_offset;
  std::uint64_t payload_offset;
  std::uint64_t nbytes;
  std::uint32_t descriptor_nbytes;  // 0, 16, or 24 in zip64

  std::uint64_t payload_end() const { return payload_offset + nbytes; }
  std::uint64_t end() const { return payload_end() + descriptor_nbytes; }
};

// The place of every byte of an archive.  Immutable; safe for concurrent use.
class ArchiveLayout {
 public:
  const std::string& root() const { return root_; }
  std::size_t size() const { return records_.size(); }
  const RecordLayout& record(std::size_t i) const { return records_[i]; }
  std::string_view name(std::size_t i) const { return full_name(i).substr(root_.size() + 1); }
  std::uint64_t central_directory_offset() const { return central_directory_offset_; }
  std::uint64_t nbytes() const { return nbytes_; }  // of the whole file
  // The first record that ends after `offset`; size() if there is none.
  std::size_t first_record_after(std::uint64_t offset) const;

  // Writes the local header of record i, extra fields and padding included:
  // record(i).payload_offset - record(i).header_offset bytes.
  void local_header(std::size_t i, std::byte* out) const;
  // Writes the data descriptor of record i: record(i).descriptor_nbytes bytes.
  void data_descriptor(std::size_t i, std::uint32_t crc, std::byte* out) const;
  // Writes the central directory and both end records, with all CRCs zero: nbytes() -
  // central_directory_offset() bytes.
  void central_directory(std::byte* out) const;
  // Puts every record's CRC, in order, into the bytes written by central_directory().
  void set_central_crcs(std::span<const std::uint32_t> crcs, std::byte* directory) const;

 private:
  friend ArchiveLayout plan_part(const std::string& root, std::span<const RecordSpec> records,
                                 std::uint64_t alignment, std::uint64_t begin);
  std::string_view full_name(std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : name_ends_[i - 1];
    return std::string_view(full_names_).substr(begin, name_ends_[i] - begin);
  }

  std::string root_;
  // The roots and names of all records in one string, because separate strings cost too much.
  std::string full_names_;
  std::vector<std::size_t> name_ends_;
  std::vector<RecordLayout> records_;
  std::uint64_t central_directory_offset_ = 0;
  std::uint64_t nbytes_ = 0;
};

// Lays out `records` in order as torch's writer does, with payloads at multiples of `alignment`.
//
// Throws std::invalid_argument for an alignment of 0, or if the padding exceeds the 65535 bytes of
// the local header's extra block, because torch then writes an unreadable file.  Throws it also for
// a duplicate name and for a bad name: over 65535 bytes with the root, empty, a leading or trailing
// '/', a NUL, a ".." component.  Throws std::length_error if the archive would exceed the format's
// limits: a central directory of 4 GiB, sizes that overflow 63 bits.
ArchiveLayout plan(const std::string& root, std::span<const RecordSpec> records,
                   std::uint64_t alignment);

// Lays out records that are appended to an archive whose existing records end at `begin`.  Does not
// plan the central directory, because it also lists the existing records.
ArchiveLayout plan_part(const std::string& root, std::span<const RecordSpec> records,
                        std::uint64_t alignment, std::uint64_t begin);

// Returns the offset at which torch's writer places the payload of a record whose local header is
// at `header_offset`.  `full_name` includes the root.  Throws as plan() does.
std::uint64_t payload_offset_after(std::uint64_t header_offset, std::string_view full_name,
                                   std::uint64_t nbytes, std::uint64_t alignment);

// Hashes the names (without root) of all records before the serialization id, in their order.
std::uint64_t hash_names(std::span<const std::string_view> names);

// torch's 40-digit `.data/serialization_id`, from hash_names() and the CRCs of the non-empty
// records, in write order.
//
// torch collects the CRCs by looking for descriptors in the bytes that its write function receives.
// An empty record has no descriptor, so it adds no CRC.  A payload that itself begins with "PK\7\8"
// and has at least 8 bytes adds its bytes 4..7, as a little-endian number, in front of its own CRC:
// see descriptor_lookalike().
std::string serialization_id(std::uint64_t names_hash, std::span<const std::uint32_t> crcs);

// The extra number that serialization_id() takes for a payload that begins with `front` (8 bytes
// suffice), if any.
std::optional<std::uint32_t> descriptor_lookalike(std::span<const std::byte> front);

// ---------------------------------------------------------------------------------------- reading

// The facts in the end-of-central-directory records.
struct CentralDirectory {
  std::uint64_t offset;
  std::uint64_t nbytes;
  std::uint64_t n_records;
};

// The bytes at the end of a file that find_central_directory() may need: EOCD with the longest
// comment, zip64 locator and zip64 EOCD.
inline constexpr std::uint64_t kMaxTailNbytes = 65535 + 22 + 20 + 56;

struct IndexedRecord {
  std::string name;  // without the root folder
  std::uint64_t nbytes = 0;
  std::uint64_t stored_nbytes = 0;  // compressed size; equals nbytes for STORED records
  std::uint32_t crc = 0;
  std::uint64_t header_offset = 0;
  // The payload's offset, computed from the central directory alone.  It is right if no gap follows
  // the record, as in every file that torch writes. payload_offset() confirms it.
  std::uint64_t payload_offset = 0;
  // Offset of the next entry's header, or of the central directory: the record ends before it.
  std::uint64_t limit = 0;
  std::uint16_t method = 0;  // 0 STORED, 8 DEFLATED, ...
  std::uint16_t flags = 0;   // general purpose bit flag
  // Whether the attributes mark a directory. torch's own reader reads no directories.
  bool directory = false;

  bool stored() const { return method == 0; }
  bool encrypted() const { return (flags & 0x41u) != 0; }
};

// The parsed central directory.  Immutable; safe for concurrent use.
class ArchiveIndex {
 public:
  static constexpr std::size_t kNotFound = ~std::size_t{0};

  const std::string& root() const { return root_; }
  std::span<const IndexedRecord> records() const { return records_; }  // in central directory order
  std::size_t find(std::string_view name) const;                       // kNotFound if absent
  // False if every CRC is zero (set_crc32_options(False)): only such a file may stay unverified.
  bool has_crcs() const { return has_crcs_; }
  bool all_stored() const { return std::ranges::all_of(records_, &IndexedRecord::stored); }
  std::uint64_t central_directory_offset() const { return central_directory_offset_; }

 private:
  friend ArchiveIndex parse_central_directory(std::span<const std::byte> bytes,
                                              const CentralDirectory& where);
  std::string root_;
  std::vector<IndexedRecord> records_;
  std::vector<std::uint32_t> by_name_;  // indices, shorter names first, then by bytes
  bool has_crcs_ = true;
  std::uint64_t central_directory_offset_ = 0;
};

// Finds the central directory in `tail`, the last min(file_nbytes, kMaxTailNbytes) bytes of an
// archive of `file_nbytes` bytes.  Throws FormatError.
CentralDirectory find_central_directory(std::span<const std::byte> tail, std::uint64_t file_nbytes);

// Parses the central directory's bytes.  Every returned record lies inside [0, where.offset), no
// two overlap, no name appears twice, no name holds a NUL, and the memory used is proportional to
// bytes.size().  Throws FormatError.
ArchiveIndex parse_central_directory(std::span<const std::byte> bytes,
                                     const CentralDirectory& where);

// The fixed part of a local header.
inline constexpr std::size_t kLocalHeaderNbytes = 30;

// Reads a local header, at least its 30 fixed bytes, and returns the payload's offset.
//
// Throws FormatError if it is not a local header or contradicts the central directory: in the
// method, the flags, the name's length, or the part of the name in `header`.  If miniz (so torch)
// wrote the header, record.payload_offset must agree, too.  The payload must not reach beyond
// `limit`, where the next record's header or the central directory begins.  Pass record.limit,
// unless you know a better limit.
std::uint64_t payload_offset(std::span<const std::byte> header, const IndexedRecord& record,
                             std::size_t root_nbytes, std::uint64_t limit);

// Returns the rule that forbids `name` (without the archive's root) for a record, or nullptr.
const char* record_name_fault(std::string_view name);

// Prepares `text` for a message: cuts long text and masks control characters.  The result is not
// always UTF-8.
std::string printable(std::string_view text);
std::string quoted(std::string_view text);

}  // namespace ptsave
