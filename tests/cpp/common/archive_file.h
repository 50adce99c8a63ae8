// Archives to read: in memory, in files, and of other writers than torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "common/archive_fixture.h"
#include "common/scratch.h"
#include "core/format/zip.h"
#include "core/io/source.h"

namespace ptsave::archive_fixture {

using scratch::Folder;
using scratch::noise;

inline std::vector<Record> records_of(const std::vector<std::size_t>& sizes) {
  std::vector<Record> records;
  records.reserve(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    records.push_back({"data/" + std::to_string(i), noise(sizes[i], i + 1)});
  }
  return records;
}

inline ByteSource memory_source(const std::string& bytes) {
  return {std::as_bytes(std::span(bytes)).data(), bytes.size(), "memory"};
}

// An archive in a file, at some offset behind other bytes.
class ArchiveFile {
 public:
  explicit ArchiveFile(const std::string& bytes, std::uint64_t offset = 0,
                       const std::string& parent = "/tmp")
      : folder_(parent), offset_(offset) {
    scratch::write_file(path(), noise(offset, 99) + bytes);
  }

  std::string path() const { return folder_ / "archive.pt"; }
  // Cold files are read directly from the first byte on, unless something else is asked for.
  ByteSource source(DirectReads direct = DirectReads::kAlways) const {
    return {File::open_for_reading(path()), offset_, direct};
  }
  void drop_from_page_cache() const { scratch::drop_from_page_cache(path()); }

 private:
  Folder folder_;
  std::uint64_t offset_;
};

// Archives of other writers: `gap_nbytes` unused bytes behind each record, and `extra_nbytes`
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
    zip::write_local_header(entry, extra_nbytes(i), bytes_of(local).data());
    local[4] = 20;  // needs version 2.0: miniz says 0
    std::string descriptor(zip::descriptor_nbytes(entry), '\0');
    if (!descriptor.empty()) zip::write_descriptor(entry, crc, bytes_of(descriptor).data());
    bytes.append(local).append(records[i].data).append(descriptor).append(noise(gap_nbytes, i));
    std::string central(zip::central_header_nbytes(entry), '\0');
    zip::write_central_header(entry, crc, bytes_of(central).data());
    directory += central;
  }
  std::string end(zip::kEndRecordsNbytes, '\0');
  zip::write_end_records({bytes.size(), directory.size(), records.size()}, bytes_of(end).data());
  return bytes + directory + end;
}

}  // namespace ptsave::archive_fixture
