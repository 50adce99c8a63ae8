// Archives to read: in memory, in files, and of other writers than torch.
#pragma once

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/scratch.h"
#include "core/format/archive.h"
#include "core/format/zip.h"
#include "core/io/source.h"

namespace ptsave::common {

inline constexpr std::uint64_t kM = 0xFFFFFFFF;  // where zip64 begins

inline std::string unhex(std::string_view digits) {
  std::string out;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    out += static_cast<char>(std::stoi(std::string(digits.substr(i, 2)), nullptr, 16));
  }
  return out;
}

// zlib's.
inline std::uint32_t crc_of(const std::string& data) {
  return static_cast<std::uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(data.data()), static_cast<uInt>(data.size())));
}

inline std::uint64_t hash_of(const std::vector<std::string>& names) {
  return hash_names(std::vector<std::string_view>(names.begin(), names.end()));
}

struct Record {
  std::string name;
  std::string data;
  bool hole = false;
};

inline std::vector<Record> records_of(const std::vector<std::size_t>& sizes) {
  std::vector<Record> records;
  records.reserve(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    records.push_back({"data/" + std::to_string(i), noise(sizes[i], i + 1)});
  }
  return records;
}

inline std::vector<RecordSpec> specs_of(const std::vector<Record>& records) {
  std::vector<RecordSpec> specs;
  for (const Record& record : records) specs.push_back({record.name, record.data.size()});
  return specs;
}

inline std::string central_directory(const ArchiveLayout& layout,
                                     const std::vector<std::uint32_t>& crcs) {
  std::string bytes(layout.nbytes() - layout.central_directory_offset(), '\0');
  layout.central_directory(data_of(bytes));
  layout.set_central_crcs(crcs, data_of(bytes));
  return bytes;
}

// A whole archive in memory, built the slow, obvious way: one record after the other, zlib's CRC.
inline std::string archive(const std::vector<Record>& records, std::uint64_t alignment = 64,
                           const std::string& root = "archive", bool with_crcs = true) {
  const ArchiveLayout layout = plan(root, specs_of(records), alignment);
  std::vector<std::uint32_t> crcs;
  std::string file(layout.central_directory_offset(), '\0');
  for (std::size_t i = 0; i < records.size(); ++i) {
    const RecordLayout& at = layout.record(i);
    crcs.push_back(with_crcs && !records[i].hole ? crc_of(records[i].data) : 0);
    layout.local_header(i, data_of(file) + at.header_offset);
    if (!records[i].hole) file.replace(at.payload_offset, at.nbytes, records[i].data);
    layout.data_descriptor(i, crcs[i], data_of(file) + at.payload_end());
  }
  file += central_directory(layout, crcs);
  EXPECT_EQ(file.size(), layout.nbytes());
  return file;
}

// An archive of another writer: `gap_nbytes` unused bytes behind each record, and `extra_nbytes`
// announced in each local header.
inline std::string foreign_archive(const std::vector<Record>& records, std::size_t gap_nbytes,
                                   const std::function<std::size_t(std::size_t)>& extra_nbytes) {
  std::string bytes;
  std::string directory;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::string name = "archive/" + records[i].name;
    const zip::Entry entry{name, records[i].data.size(), bytes.size()};
    const std::uint32_t crc = crc_of(records[i].data);
    std::string local(zip::local_header_nbytes(entry), '\0');
    zip::write_local_header(entry, extra_nbytes(i), data_of(local));
    local[4] = 20;  // needs version 2.0: miniz says 0
    std::string descriptor(zip::descriptor_nbytes(entry), '\0');
    if (!descriptor.empty()) zip::write_descriptor(entry, crc, data_of(descriptor));
    bytes.append(local).append(records[i].data).append(descriptor).append(noise(gap_nbytes, i));
    std::string central(zip::central_header_nbytes(entry), '\0');
    zip::write_central_header(entry, crc, data_of(central));
    directory += central;
  }
  std::string end(zip::kEndRecordsNbytes, '\0');
  zip::write_end_records({bytes.size(), directory.size(), records.size()}, data_of(end));
  return bytes + directory + end;
}

inline ByteSource memory_source(const std::string& bytes) {
  return {data_of(bytes), bytes.size(), "memory"};
}

inline ByteSource file_source(const std::string& path, DirectReads direct = DirectReads::kAlone) {
  return {File::open_for_reading(path), 0, direct};
}

template <typename... Source>
std::vector<ByteSource> sources_of(Source... sources) {
  std::vector<ByteSource> all;
  (all.push_back(std::move(sources)), ...);
  return all;
}

// An archive in a file, at some offset behind other bytes.
class ArchiveFile {
 public:
  explicit ArchiveFile(const std::string& bytes, std::uint64_t offset = 0,
                       const std::string& parent = "/tmp")
      : folder_(parent), offset_(offset) {
    write_file(path(), noise(offset, 99) + bytes);
  }

  std::string path() const { return folder_ / "archive.pt"; }
  // Cold files are read directly from the first byte on, unless something else is asked for.
  ByteSource source(DirectReads direct = DirectReads::kAlways) const {
    return {File::open_for_reading(path()), offset_, direct};
  }
  void drop_from_page_cache() const { common::drop_from_page_cache(path()); }

 private:
  Folder folder_;
  std::uint64_t offset_;
};

}  // namespace ptsave::common
