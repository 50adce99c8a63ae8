// ZIP64 wire structures.  Follows PKWARE's APPNOTE as miniz does for an unseekable stream of STORED
// entries, with sizes and CRC in a data descriptor.  Independent of torch.
//
// All functions are pure.  Writers fill memory that the caller has sized with the matching
// *_nbytes().  Parsers read only inside their span and never allocate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace ptsave::zip {

inline constexpr std::uint64_t kMax16 = 0xFFFFu;
// Sizes and offsets of at least this value are stored in a zip64 field.  The 32-bit field then has
// this value as a mark.
inline constexpr std::uint64_t kMax32 = 0xFFFFFFFFu;

inline constexpr std::uint32_t kDescriptorSignature = 0x08074b50;

inline constexpr std::size_t kLocalHeaderNbytes = 30;    // without name and extra fields
inline constexpr std::size_t kCentralCrcOffset = 16;     // in a central header
inline constexpr std::size_t kCentralHeaderNbytes = 46;  // without name, extra fields and comment
inline constexpr std::size_t kExtraHeadNbytes = 4;       // id and size in front of an extra field
inline constexpr std::size_t kZip64EndNbytes = 56;
inline constexpr std::size_t kZip64LocatorNbytes = 20;
inline constexpr std::size_t kEndNbytes = 22;
// Everything behind the central directory: zip64 EOCD, its locator, EOCD without comment.
inline constexpr std::size_t kEndRecordsNbytes = kZip64EndNbytes + kZip64LocatorNbytes + kEndNbytes;
inline constexpr std::size_t kMaxZip64ExtraNbytes = kExtraHeadNbytes + 3 * 8;

inline constexpr std::uint16_t kFlagEncrypted = 1u << 0;
inline constexpr std::uint16_t kFlagDescriptor = 1u << 3;
inline constexpr std::uint16_t kFlagPatch = 1u << 5;
inline constexpr std::uint16_t kFlagStrongEncryption = 1u << 6;
inline constexpr std::uint16_t kFlagUtf8 = 1u << 11;
inline constexpr std::uint16_t kFlagMasked = 1u << 13;

// A bit of the external attributes, as DOS and miniz define it.
inline constexpr std::uint32_t kDirectoryAttribute = 1u << 4;

std::uint16_t load16(const std::byte* p);
std::uint32_t load32(const std::byte* p);
std::uint64_t load64(const std::byte* p);
// Store little-endian and return the address behind the value.
std::byte* store16(std::byte* p, std::uint64_t value);
std::byte* store32(std::byte* p, std::uint64_t value);
std::byte* store64(std::byte* p, std::uint64_t value);

// ---------------------------------------------------------------------------------------- writing

// A STORED entry to write.
struct Entry {
  std::string_view name;  // at most 65535 bytes
  std::uint64_t nbytes = 0;
  std::uint64_t header_offset = 0;

  bool zip64() const { return nbytes >= kMax32 || header_offset >= kMax32; }
};

// Size of the entry's zip64 extra field, the same in both headers; 0 if it needs none.
std::size_t zip64_extra_nbytes(const Entry& entry);

// Local header: fixed part, name and zip64 extra.  Its extra length includes `more_extra_nbytes`
// bytes that the caller writes after the header.  Returns the address after the header.
std::size_t local_header_nbytes(const Entry& entry);
std::byte* write_local_header(const Entry& entry, std::size_t more_extra_nbytes, std::byte* out);

// Data descriptor.  An empty entry has none.  Its sizes have 64 bits if the local header has a
// zip64 extra, and otherwise 32.
std::uint32_t descriptor_nbytes(const Entry& entry);
std::byte* write_descriptor(const Entry& entry, std::uint32_t crc, std::byte* out);

std::size_t central_header_nbytes(const Entry& entry);
std::byte* write_central_header(const Entry& entry, std::uint32_t crc, std::byte* out);

// Place and size of the central directory.
struct Directory {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::uint64_t n_entries = 0;
};

// Writes kEndRecordsNbytes bytes, directly behind the directory.
std::byte* write_end_records(const Directory& directory, std::byte* out);

// ---------------------------------------------------------------------------------------- reading

// Either end-of-central-directory record.
struct End {
  Directory directory;
  std::uint64_t n_entries_on_disk = 0;
  std::uint32_t disk = 0;
  std::uint32_t directory_disk = 0;
  std::uint64_t record_nbytes = 0;  // of the record itself, as it claims; comment included
};

struct Zip64Locator {
  std::uint64_t end_offset = 0;  // of the zip64 EOCD
  std::uint32_t n_disks = 0;
};

// Parse the record at the front of `bytes`; nothing if it is missing or incomplete.
std::optional<End> parse_end(std::span<const std::byte> bytes);
std::optional<End> parse_zip64_end(std::span<const std::byte> bytes);
std::optional<Zip64Locator> parse_zip64_locator(std::span<const std::byte> bytes);

// Index of the last complete EOCD record whose comment has at most 65535 bytes.
std::optional<std::size_t> find_end(std::span<const std::byte> tail);

struct LocalHeader {
  std::uint16_t version_needed = 0;
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint16_t name_nbytes = 0;
  std::uint16_t extra_nbytes = 0;
};

std::optional<LocalHeader> parse_local_header(std::span<const std::byte> bytes);

struct CentralHeader {
  std::string_view name;  // in the bytes parsed
  std::uint64_t nbytes = 0;
  std::uint64_t stored_nbytes = 0;
  std::uint64_t header_offset = 0;
  std::uint32_t crc = 0;
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint16_t disk = 0;
  std::uint32_t external_attributes = 0;
  std::size_t header_nbytes = 0;  // of the whole header, to find the next one
};

// Parses the central header at the front of `bytes` and resolves its zip64 fields.  Returns nullptr
// or a fault.  After a fault, `header` is unspecified.
const char* parse_central_header(std::span<const std::byte> bytes, CentralHeader& header);

}  // namespace ptsave::zip
