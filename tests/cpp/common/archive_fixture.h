// Whole archives in memory, for the tests of archive.
#pragma once

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/format/archive.h"

namespace ptsave::archive_fixture {

using std::string;

inline constexpr std::uint64_t kM = 0xFFFFFFFF;  // where zip64 begins

inline std::span<std::byte> bytes_of(string& text) {
  return std::as_writable_bytes(std::span(text));
}

inline string unhex(std::string_view digits) {
  string out;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    out += static_cast<char>(std::stoi(string(digits.substr(i, 2)), nullptr, 16));
  }
  return out;
}

inline std::uint32_t crc_of(const string& data) {
  return static_cast<std::uint32_t>(
      crc32(0, reinterpret_cast<const Bytef*>(data.data()), static_cast<uInt>(data.size())));
}

inline string central_directory(const ArchiveLayout& layout,
                                const std::vector<std::uint32_t>& crcs) {
  string bytes(layout.nbytes() - layout.central_directory_offset(), '\0');
  layout.central_directory(bytes_of(bytes).data());
  layout.set_central_crcs(crcs, bytes_of(bytes).data());
  return bytes;
}

inline std::uint64_t hash_of(const std::vector<string>& names) {
  return hash_names(std::vector<std::string_view>(names.begin(), names.end()));
}

struct Record {
  string name;
  string data;
};

// A whole archive in memory, as torch would write it.
inline string archive(const std::vector<Record>& records, std::uint64_t alignment = 64,
                      const string& root = "archive", bool with_crcs = true) {
  std::vector<RecordSpec> specs;
  std::vector<std::uint32_t> crcs;
  for (const Record& record : records) {
    specs.push_back({record.name, record.data.size()});
    crcs.push_back(with_crcs ? crc_of(record.data) : 0);
  }
  const ArchiveLayout layout = plan(root, specs, alignment);
  string file(layout.central_directory_offset(), '\0');
  for (std::size_t i = 0; i < records.size(); ++i) {
    const RecordLayout& at = layout.record(i);
    layout.local_header(i, bytes_of(file).data() + at.header_offset);
    file.replace(at.payload_offset, at.nbytes, records[i].data);
    layout.data_descriptor(i, crcs[i], bytes_of(file).data() + at.payload_end());
  }
  file += central_directory(layout, crcs);
  EXPECT_EQ(file.size(), layout.nbytes());
  return file;
}

}  // namespace ptsave::archive_fixture
