// The reading half of archive.h: parsers of hostile bytes.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "core/base/error.h"
#include "core/format/archive.h"
#include "core/format/zip.h"

namespace ptsave {
namespace {

static_assert(kLocalHeaderNbytes == zip::kLocalHeaderNbytes);
static_assert(kMaxTailNbytes == zip::kMax16 + zip::kEndRecordsNbytes);

// torch's messages: "PytorchStreamReader failed <doing>: <miniz's error string>".
constexpr const char* kCorrupt = "invalid header or archive is corrupted";
constexpr const char* kInvalidName = "invalid filename";
constexpr const char* kMultidisk = "unsupported multidisk archive";
constexpr const char* kEncryption = "unsupported encryption";

template <typename Error = FormatError>
[[noreturn]] void fail_archive(const char* miniz_error, std::string detail, std::string record = {},
                               std::uint64_t offset = FormatError::kNoOffset) {
  throw Error(std::string("PytorchStreamReader failed reading zip archive: ") + miniz_error,
              std::move(detail), std::move(record), offset);
}

[[noreturn]] void fail_record(const char* miniz_error, std::string detail,
                              const IndexedRecord& record) {
  throw FormatError("PytorchStreamReader failed reading file " + record.name + ": " + miniz_error,
                    std::move(detail), record.name, record.header_offset);
}

// Whether an EOCD value equals the zip64 value, or is the "look in zip64" mark.
bool agrees(std::uint64_t narrow, std::uint64_t wide, std::uint64_t mark) {
  return narrow == mark || narrow == wide;
}

// The zip64 EOCD and the fields of its locator.
struct Zip64End {
  zip::End end;
  std::uint64_t offset;
  std::uint64_t locator_offset;
  std::uint32_t n_disks;
};

// Returns nothing if there is no locator in front of the EOCD at `end_index`.
std::optional<Zip64End> find_zip64_end(std::span<const std::byte> tail, std::size_t end_index,
                                       std::uint64_t tail_offset) {
  if (end_index < zip::kZip64LocatorNbytes) return std::nullopt;
  const std::size_t locator_index = end_index - zip::kZip64LocatorNbytes;
  const auto locator =
      zip::parse_zip64_locator(tail.subspan(locator_index, zip::kZip64LocatorNbytes));
  if (!locator) return std::nullopt;
  const std::uint64_t offset = locator->end_offset;
  const std::uint64_t locator_offset = tail_offset + locator_index;
  if (offset > locator_offset || locator_offset - offset < zip::kZip64EndNbytes) {
    fail_archive<MissingEndError>(
        "not a ZIP archive", "zip64 locator points outside the file's end", {}, locator_offset);
  }
  if (offset < tail_offset) {
    fail_archive(kCorrupt, "zip64 end record is not near the end of the file", {}, offset);
  }
  const auto end = zip::parse_zip64_end(
      tail.subspan(static_cast<std::size_t>(offset - tail_offset), zip::kZip64EndNbytes));
  if (!end) fail_archive(kCorrupt, "no zip64 end record where its locator points", {}, offset);
  return Zip64End{*end, offset, locator_offset, locator->n_disks};
}

// miniz's own limits, in its order.
void check_zip64_limits(const Zip64End& wide) {
  const zip::Directory& directory = wide.end.directory;
  if (wide.end.record_nbytes < zip::kZip64EndNbytes) {
    fail_archive(kCorrupt, "zip64 end record gives itself too small a size", {}, wide.offset);
  }
  if (wide.n_disks != 1) {
    fail_archive(kMultidisk, "zip64 locator does not count one disk", {}, wide.locator_offset);
  }
  const std::uint64_t n_entries = std::max(directory.n_entries, wide.end.n_entries_on_disk);
  if (n_entries > zip::kMax32) {
    fail_archive("too many files", std::to_string(n_entries) + " records claimed", {}, wide.offset);
  }
  if (directory.nbytes > zip::kMax32) {
    fail_archive("unsupported central directory size",
                 std::to_string(directory.nbytes) + " bytes claimed", {}, wide.offset);
  }
}

void check_disks(const zip::End& end, std::uint64_t offset) {
  if (end.n_entries_on_disk != end.directory.n_entries) {
    fail_archive(kMultidisk, "end record counts records on other disks", {}, offset);
  }
  const bool one_disk =
      (end.disk | end.directory_disk) == 0 || (end.disk == 1 && end.directory_disk == 1);
  if (!one_disk) fail_archive(kMultidisk, "end record names several disks", {}, offset);
}

// Compares fields that miniz does not compare.
void check_zip64_agreement(const zip::End& narrow, const Zip64End& wide, std::uint64_t offset) {
  const zip::End& end = wide.end;
  const bool same = agrees(narrow.directory.offset, end.directory.offset, zip::kMax32) &&
                    agrees(narrow.directory.nbytes, end.directory.nbytes, zip::kMax32) &&
                    agrees(narrow.directory.n_entries, end.directory.n_entries, zip::kMax16) &&
                    agrees(narrow.n_entries_on_disk, end.n_entries_on_disk, zip::kMax16);
  if (!same) fail_archive(kCorrupt, "the two end records contradict each other", {}, offset);
  if (end.record_nbytes > wide.locator_offset - wide.offset) {
    fail_archive(kCorrupt, "zip64 end record runs into its locator", {}, wide.offset);
  }
}

// `limit` is the offset of the end records: the directory must end there or before.
void check_directory_place(const zip::Directory& directory, std::uint64_t limit) {
  if (directory.n_entries > directory.nbytes / zip::kCentralHeaderNbytes) {
    fail_archive(kCorrupt,
                 std::to_string(directory.n_entries) +
                     " records cannot fit a central directory of " +
                     std::to_string(directory.nbytes) + " bytes",
                 {}, limit);
  }
  if (directory.offset > limit || directory.nbytes > limit - directory.offset) {
    fail_archive(kCorrupt, "central directory runs into the end record", {}, directory.offset);
  }
}

}  // namespace

CentralDirectory find_central_directory(std::span<const std::byte> tail,
                                        std::uint64_t file_nbytes) {
  if (tail.size() > file_nbytes) throw std::invalid_argument("the tail is longer than the file");
  if (file_nbytes < zip::kEndNbytes) {
    fail_archive<MissingEndError>("not a ZIP archive",
                                  "file of " + std::to_string(file_nbytes) + " bytes");
  }
  const auto end_index = zip::find_end(tail);
  if (!end_index) {
    fail_archive<MissingEndError>(
        "failed finding central directory",
        "no end record in the last 64 KiB: truncated, or not a zip archive");
  }
  const std::uint64_t tail_offset = file_nbytes - tail.size();
  const std::uint64_t end_offset = tail_offset + *end_index;
  const zip::End narrow = *zip::parse_end(tail.subspan(*end_index));
  const auto wide = find_zip64_end(tail, *end_index, tail_offset);
  const zip::End& end = wide ? wide->end : narrow;
  const std::uint64_t limit = wide ? wide->offset : end_offset;
  if (wide) check_zip64_limits(*wide);
  check_disks(end, limit);
  if (wide) check_zip64_agreement(narrow, *wide, end_offset);
  check_directory_place(end.directory, limit);
  return {end.directory.offset, end.directory.nbytes, end.directory.n_entries};
}

namespace {

std::string_view root_of(std::string_view first_name) {
  const std::size_t slash = first_name.find('/');
  if (slash == std::string_view::npos) {
    throw FormatError("file in archive is not in a subdirectory: " + printable(first_name),
                      "the first record names the archive's root folder");
  }
  const std::string_view root = first_name.substr(0, slash);
  if (root.empty() || root.find('\0') != std::string_view::npos) {
    fail_archive(kInvalidName, "the archive's root folder has no valid name");
  }
  return root;
}

// The name without root; empty for the root folder's own entry.
std::string_view strip_root(std::string_view full_name, std::string_view root) {
  if (full_name.size() <= root.size() || !full_name.starts_with(root) ||
      full_name[root.size()] != '/') {
    throw FormatError("file in archive is not in a subdirectory " + printable(root) +
                          "/: " + printable(full_name),
                      "every record must be in the root folder of the first");
  }
  return full_name.substr(root.size() + 1);
}

bool is_folder(const zip::CentralHeader& header) { return header.name.ends_with('/'); }

// Checks a header as miniz does, in the same order.
void check_central_header(const zip::CentralHeader& header) {
  const std::string_view name = header.name.substr(header.name.find('/') + 1);  // all if no '/'
  const auto fail = [&](const char* miniz_error, const char* fault) {
    fail_archive(miniz_error, "record " + quoted(name) + " " + fault, std::string(name),
                 header.header_offset);
  };
  const bool same_sizes = header.nbytes == header.stored_nbytes;
  const bool plain = header.method == 0 && (header.flags & zip::kFlagEncrypted) == 0;
  if ((plain && !same_sizes) || (header.nbytes != 0 && header.stored_nbytes == 0)) {
    fail(kCorrupt, "has contradictory sizes");
  }
  if (header.disk > 1) fail(kMultidisk, "lies on another disk");
  if ((header.flags & zip::kFlagMasked) != 0) fail(kEncryption, "has a masked header");
}

void check_central_name(const zip::CentralHeader& header, std::string_view name) {
  const auto fail = [&](const char* miniz_error, const std::string& detail) {
    fail_archive(miniz_error, detail, std::string(name), header.header_offset);
  };
  // Only the root folder's own entry has an empty name.
  const char* fault = name.empty() ? nullptr : record_name_fault(name);
  if (fault != nullptr) fail(kInvalidName, "record name " + quoted(name) + " " + fault);
  if (is_folder(header) && (header.nbytes | header.stored_nbytes) != 0) {
    fail(kCorrupt, "folder " + quoted(name) + " holds data");
  }
}

void check_directory_nbytes(std::span<const std::byte> bytes, const CentralDirectory& where) {
  if (bytes.size() != where.nbytes || bytes.size() > zip::kMax32 ||
      where.n_records > bytes.size() / zip::kCentralHeaderNbytes) {
    fail_archive(kCorrupt, "central directory has another size than announced", {}, where.offset);
  }
  if (where.n_records == 0) {
    throw FormatError("archive does not contain any files", "empty central directory");
  }
}

// Takes the header from the front of `rest`, which lies at `offset`.
zip::CentralHeader take_central_header(std::span<const std::byte>& rest, std::uint64_t offset) {
  zip::CentralHeader header;
  if (const char* fault = zip::parse_central_header(rest, header)) {
    fail_archive(kCorrupt, fault, {}, offset);
  }
  rest = rest.subspan(header.header_nbytes);
  return header;
}

IndexedRecord indexed(const zip::CentralHeader& header, std::string_view name) {
  return {.name = std::string(name),
          .nbytes = header.nbytes,
          .stored_nbytes = header.stored_nbytes,
          .crc = header.crc,
          .header_offset = header.header_offset,
          .method = header.method,
          .flags = header.flags,
          .directory = (header.external_attributes & zip::kDirectoryAttribute) != 0};
}

// The part of the file that an entry may fill: from its local header to the next one's.
struct Extent {
  std::uint64_t header_offset;
  std::uint64_t stored_nbytes;
  std::size_t name_nbytes;  // of the full name
  std::size_t record;       // index, or kNotFound for a folder
};

// Offset of the payload, if the record fills the extent.  If a zip writer left gaps, the offset is
// wrong, but never out of bounds.  `slack_nbytes` is the size of the extent minus fixed header,
// name and payload.
std::uint64_t predict_payload_offset(const IndexedRecord& record, std::uint64_t limit,
                                     std::uint64_t slack_nbytes) {
  const bool descriptor = (record.flags & zip::kFlagDescriptor) != 0;
  const std::uint64_t descriptor_nbytes =
      descriptor ? zip::descriptor_nbytes({{}, record.nbytes, record.header_offset}) : 0;
  return limit - record.stored_nbytes - std::min(descriptor_nbytes, slack_nbytes);
}

// Sorts by merging the runs that are already in order, because they are few and long here.
template <typename Value, typename Less>
void merge_runs(std::vector<Value>& values, const Less& less) {
  std::vector<std::size_t> ends;  // of the sorted runs
  for (auto at = values.begin(); at != values.end();) {
    at = std::is_sorted_until(at, values.end(), less);
    ends.push_back(static_cast<std::size_t>(at - values.begin()));
  }
  const auto position = [&](std::size_t n) {
    return values.begin() + static_cast<std::ptrdiff_t>(n);
  };
  while (ends.size() > 1) {
    std::vector<std::size_t> merged;
    for (std::size_t i = 0; i < ends.size(); i += 2) {
      const std::size_t begin = i == 0 ? 0 : ends[i - 1];
      const std::size_t end = i + 1 < ends.size() ? ends[i + 1] : ends[i];
      if (end > ends[i]) {
        std::inplace_merge(position(begin), position(ends[i]), position(end), less);
      }
      merged.push_back(end);
    }
    ends = std::move(merged);
  }
}

void place_records(std::vector<Extent>& extents, std::uint64_t end,
                   std::vector<IndexedRecord>& records) {
  merge_runs(extents,
             [](const Extent& a, const Extent& b) { return a.header_offset < b.header_offset; });
  for (std::size_t i = 0; i < extents.size(); ++i) {
    const Extent& extent = extents[i];
    const std::uint64_t limit = i + 1 < extents.size() ? extents[i + 1].header_offset : end;
    const std::uint64_t header_nbytes = kLocalHeaderNbytes + extent.name_nbytes;
    if (extent.header_offset > limit || limit - extent.header_offset < header_nbytes ||
        limit - extent.header_offset - header_nbytes < extent.stored_nbytes) {
      const bool folder = extent.record == ArchiveIndex::kNotFound;
      fail_archive(kCorrupt,
                   "the entry at this offset runs into the next one or the central directory",
                   folder ? std::string() : records[extent.record].name, extent.header_offset);
    }
    if (extent.record == ArchiveIndex::kNotFound) continue;
    IndexedRecord& record = records[extent.record];
    record.limit = limit;
    record.payload_offset = predict_payload_offset(
        record, limit, limit - extent.header_offset - header_nbytes - extent.stored_nbytes);
  }
}

// Shorter names first: torch's "data/0", "data/1", ... are then already in order.
bool name_before(std::string_view a, std::string_view b) {
  return a.size() != b.size() ? a.size() < b.size() : a < b;
}

// Indices of `records` by name.  Sorted, not hashed: std::hash has no secret, so hostile names
// could all have one hash.
std::vector<std::uint32_t> sort_by_name(const std::vector<IndexedRecord>& records) {
  std::vector<std::uint32_t> order(records.size());
  std::iota(order.begin(), order.end(), 0u);
  merge_runs(order, [&](std::uint32_t a, std::uint32_t b) {
    return name_before(records[a].name, records[b].name);
  });
  const auto twice = std::adjacent_find(order.begin(), order.end(), [&](auto a, auto b) {
    return records[a].name == records[b].name;
  });
  if (twice != order.end()) {
    const IndexedRecord& record = records[*twice];
    fail_archive(kCorrupt, "two records have the name " + quoted(record.name), record.name,
                 record.header_offset);
  }
  return order;
}

bool any_crc(std::span<const IndexedRecord> records) {
  const auto has_crc = [](const IndexedRecord& record) { return record.crc != 0; };
  const auto has_data = [](const IndexedRecord& r) { return r.stored() && r.nbytes != 0; };
  return std::any_of(records.begin(), records.end(), has_crc) ||
         std::none_of(records.begin(), records.end(), has_data);
}

}  // namespace

ArchiveIndex parse_central_directory(std::span<const std::byte> bytes,
                                     const CentralDirectory& where) {
  check_directory_nbytes(bytes, where);
  ArchiveIndex index;
  index.central_directory_offset_ = where.offset;
  index.records_.reserve(static_cast<std::size_t>(where.n_records));
  std::vector<Extent> extents;
  extents.reserve(static_cast<std::size_t>(where.n_records));
  std::span<const std::byte> rest = bytes;
  for (std::uint64_t i = 0; i < where.n_records; ++i) {
    const zip::CentralHeader header =
        take_central_header(rest, where.offset + (bytes.size() - rest.size()));
    check_central_header(header);
    if (i == 0) index.root_ = root_of(header.name);
    const std::string_view name = strip_root(header.name, index.root_);
    check_central_name(header, name);
    extents.push_back({header.header_offset, header.stored_nbytes, header.name.size(),
                       is_folder(header) ? ArchiveIndex::kNotFound : index.records_.size()});
    if (!is_folder(header)) index.records_.push_back(indexed(header, name));
  }
  if (!rest.empty()) {
    fail_archive(kCorrupt, "central directory has bytes after its last record", {},
                 where.offset + (bytes.size() - rest.size()));
  }
  place_records(extents, where.offset, index.records_);
  index.by_name_ = sort_by_name(index.records_);
  index.has_crcs_ = any_crc(index.records_);
  return index;
}

std::size_t ArchiveIndex::find(std::string_view name) const {
  const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [this](std::uint32_t i, std::string_view wanted) {
                                     return name_before(records_[i].name, wanted);
                                   });
  return at != by_name_.end() && records_[*at].name == name ? *at : kNotFound;
}

namespace {

// Refuses records that torch refuses to read, in torch's order, by their central header.
void check_supported(const IndexedRecord& record) {
  constexpr std::uint16_t kDeflated = 8;
  const auto fail = [&](const char* miniz_error, std::string detail) {
    throw FormatError("PytorchStreamReader failed retrieving file meta-data for " + record.name +
                          ": " + miniz_error,
                      std::move(detail), record.name, record.header_offset);
  };
  if (!record.stored() && record.method != kDeflated) {
    fail("unsupported method", "compressed by method " + std::to_string(record.method));
  }
  if ((record.flags & (zip::kFlagEncrypted | zip::kFlagStrongEncryption)) != 0) {
    fail(kEncryption, "marked as encrypted");
  }
  if ((record.flags & zip::kFlagPatch) != 0) fail("unsupported feature", "marked as a patch");
}

// Compares fields that torch does not compare; `header` may end inside the name.
zip::LocalHeader parse_agreeing_header(std::span<const std::byte> header,
                                       const IndexedRecord& record, std::size_t root_nbytes) {
  // The bits that change the meaning or the end of the payload; a reader needs no other bits.
  constexpr std::uint16_t kMeaningful = zip::kFlagEncrypted | zip::kFlagDescriptor |
                                        zip::kFlagPatch | zip::kFlagStrongEncryption |
                                        zip::kFlagMasked;
  const auto local = zip::parse_local_header(header);
  if (!local) fail_record(kCorrupt, "no local header where its offset points", record);
  if (local->method != record.method || ((local->flags ^ record.flags) & kMeaningful) != 0) {
    fail_record(kCorrupt, "local header contradicts the central directory", record);
  }
  const std::size_t full_name_nbytes = root_nbytes + 1 + record.name.size();
  const std::span<const std::byte> rest = header.subspan(kLocalHeaderNbytes);
  std::string_view name(reinterpret_cast<const char*>(rest.data()),
                        std::min(rest.size(), full_name_nbytes));
  name.remove_prefix(std::min(name.size(), root_nbytes + 1));
  if (local->name_nbytes != full_name_nbytes || !record.name.starts_with(name)) {
    fail_record(kCorrupt, "local header has another name", record);
  }
  return *local;
}

}  // namespace

std::uint64_t payload_offset(std::span<const std::byte> header, const IndexedRecord& record,
                             std::size_t root_nbytes, std::uint64_t limit) {
  check_supported(record);
  const zip::LocalHeader local = parse_agreeing_header(header, record, root_nbytes);
  const std::uint64_t header_nbytes = kLocalHeaderNbytes + local.name_nbytes + local.extra_nbytes;
  if (record.header_offset > limit || limit - record.header_offset < header_nbytes ||
      limit - record.header_offset - header_nbytes < record.stored_nbytes) {
    fail_record(kCorrupt, "payload runs into the next record or the central directory", record);
  }
  const std::uint64_t offset = record.header_offset + header_nbytes;
  // Only miniz writes version 0, and it leaves no gaps: a payload elsewhere means a damaged extra
  // length.  In a file without CRCs no other check finds this damage.
  if (local.version_needed == 0 && offset != record.payload_offset) {
    fail_record(kCorrupt, "local header's extra fields do not end at the payload's place", record);
  }
  return offset;
}

}  // namespace ptsave
