// torch's archive conventions on top of zip: where every byte of a `.pt` file goes (plan) and where
// it is (parse).  Pure functions of bytes and numbers: no files, no threads, no global state.
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
  std::uint64_t alignment = 1;  // of its payload; counts where it is a multiple of the archive's
};

// Offsets of one record: local header, payload, data descriptor (none after an empty record).
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
  // The first record that ends behind a position; size() if there is none.
  std::size_t first_record_after(std::uint64_t offset) const;

  // Local header of record i, extra fields and padding included; it ends at payload_offset.
  // Writes record(i).payload_offset - record(i).header_offset bytes to `out`.
  void local_header(std::size_t i, std::byte* out) const;
  // Data descriptor of record i: record(i).descriptor_nbytes bytes.
  void data_descriptor(std::size_t i, std::uint32_t crc, std::byte* out) const;
  // Central directory and both end records, with all CRCs zero: nbytes() -
  // central_directory_offset() bytes.
  void central_directory(std::byte* out) const;
  // Puts every record's CRC, in order, into the bytes that central_directory() has written.
  void set_central_crcs(std::span<const std::uint32_t> crcs, std::byte* directory) const;

 private:
  friend ArchiveLayout plan_part(const std::string& root, std::span<const RecordSpec> records,
                                 std::uint64_t alignment, std::uint64_t begin);
  std::string_view full_name(std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : name_ends_[i - 1];
    return std::string_view(full_names_).substr(begin, name_ends_[i] - begin);
  }

  std::string root_;
  // Root and name of every record, one after another: a string each would cost more than the rest
  // of the layout.
  std::string full_names_;
  std::vector<std::size_t> name_ends_;
  std::vector<RecordLayout> records_;
  std::uint64_t central_directory_offset_ = 0;
  std::uint64_t nbytes_ = 0;
};

// Lays out `records` in the given order as torch's writer does, each payload at a multiple of
// `alignment` (at least 1; std::invalid_argument where the padding does not fit the 65535 bytes of
// the local header's extra block, because torch then writes a file that nothing can read). Throws
// std::invalid_argument for a name that does not fit the format (root included over 65535 bytes,
// empty, a leading or trailing '/', a NUL, a ".." component), for a duplicate name, and
// std::length_error when the archive would exceed the format (central directory of 4 GiB, sizes
// that overflow 63 bits).
ArchiveLayout plan(const std::string& root, std::span<const RecordSpec> records,
                   std::uint64_t alignment);

// The same for records that are appended to an archive whose records so far end at `begin`.  What
// the central directory would be is not planned: there are more records than these.
ArchiveLayout plan_part(const std::string& root, std::span<const RecordSpec> records,
                        std::uint64_t alignment, std::uint64_t begin);

// Offset of the payload of a record whose local header is at `header_offset`, as torch's writer
// places it.  `full_name` includes the root.  Throws as plan() does.
std::uint64_t payload_offset_after(std::uint64_t header_offset, std::string_view full_name,
                                   std::uint64_t nbytes, std::uint64_t alignment);

// The part of the serialization id that the names (without root) of all records written before it
// make, in write order.
std::uint64_t hash_names(std::span<const std::string_view> names);

// torch's 40-digit `.data/serialization_id`, from hash_names() and the CRCs of the non-empty
// records, in write order. torch collects the CRCs by looking at bytes that pass its write
// function, so an empty record (no data descriptor) adds none, and a payload that itself begins
// with "PK\7\8" and has at least 8 bytes adds its bytes 4..7 as a little-endian number in front of
// its own CRC: see descriptor_lookalike().
std::string serialization_id(std::uint64_t names_hash, std::span<const std::uint32_t> crcs);

// The extra number a payload that begins with `front` (8 bytes suffice) adds, if it does.
std::optional<std::uint32_t> descriptor_lookalike(std::span<const std::byte> front);

// ---------------------------------------------------------------------------------------- reading

// From the end-of-central-directory records.
struct CentralDirectory {
  std::uint64_t offset;
  std::uint64_t nbytes;
  std::uint64_t n_records;
};

// The most bytes at the end of a file that can matter to find_central_directory: EOCD with the
// longest comment, zip64 locator and zip64 EOCD.
inline constexpr std::uint64_t kMaxTailNbytes = 65535 + 22 + 20 + 56;

struct IndexedRecord {
  std::string name;  // without the root folder
  std::uint64_t nbytes = 0;
  std::uint64_t stored_nbytes = 0;  // compressed size; equals nbytes for STORED records
  std::uint32_t crc = 0;
  std::uint64_t header_offset = 0;
  // Offset of the payload if the record fills its place up to the next header (as in every file
  // that torch writes).  Taken from the central directory alone; payload_offset() below confirms
  // it.
  std::uint64_t payload_offset = 0;
  // Offset of the next entry's header, or of the central directory: the record ends before it.
  std::uint64_t limit = 0;
  std::uint16_t method = 0;  // 0 STORED, 8 DEFLATED, ...
  std::uint16_t flags = 0;   // general purpose bit flag
  // Whether its attributes call it a directory, in which case torch's own reader leaves the memory
  // for its payload as it was.
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
  // False when every CRC of the file is zero (written with set_crc32_options(False)): only such a
  // file may go unverified.
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

// Finds the central directory in the last bytes of an archive of `file_nbytes` bytes; `tail` holds
// the last min(file_nbytes, kMaxTailNbytes) of them.  Throws FormatError.
CentralDirectory find_central_directory(std::span<const std::byte> tail, std::uint64_t file_nbytes);

// Parses the central directory's own bytes.  Every record returned lies inside [0, where.offset),
// no two overlap, no name appears twice, no name holds a NUL, and the memory used is proportional
// to bytes.size().  Throws FormatError.
ArchiveIndex parse_central_directory(std::span<const std::byte> bytes,
                                     const CentralDirectory& where);

// The fixed part of a local header.
inline constexpr std::size_t kLocalHeaderNbytes = 30;

// Reads a local header (at least its 30 fixed bytes; `header` may be longer) and returns where its
// payload begins.  Throws FormatError if it is not a local header, contradicts the central
// directory (method, flags, name length; the name too where `header` holds it;
// record.payload_offset too where miniz, so torch, wrote it) or its payload would end beyond
// `limit`, the next record's header or the central directory: record.limit, unless the caller knows
// better.
std::uint64_t payload_offset(std::span<const std::byte> header, const IndexedRecord& record,
                             std::size_t root_nbytes, std::uint64_t limit);

}  // namespace ptsave
