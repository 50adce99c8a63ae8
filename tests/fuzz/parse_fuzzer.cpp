// The input is a whole archive.  Whatever parses must keep the promises of archive.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "core/base/error.h"
#include "core/format/archive.h"

namespace {

void require(bool promise) {
  if (!promise) std::abort();
}

void check_record(std::span<const std::byte> file, const ptsave::ArchiveIndex& index,
                  std::size_t i) {
  const ptsave::IndexedRecord& record = index.records()[i];
  const std::uint64_t end = index.central_directory_offset();
  require(index.find(record.name) == i);
  require(record.header_offset < record.limit && record.limit <= end && end <= file.size());
  require(record.payload_offset >=
          record.header_offset + ptsave::kLocalHeaderNbytes + record.name.size());
  require(record.payload_offset <= record.limit);
  require(record.stored_nbytes <= record.limit - record.payload_offset);
  const auto rest = file.subspan(static_cast<std::size_t>(record.header_offset));
  const std::size_t root_nbytes = index.root().size();
  // A short and a generous read have to agree, unless the generous one shows another name.
  for (const std::size_t read_nbytes : {rest.size(), ptsave::kLocalHeaderNbytes}) {
    try {
      const std::uint64_t offset = ptsave::payload_offset(
          rest.first(std::min(rest.size(), read_nbytes)), record, root_nbytes, record.limit);
      require(offset > record.header_offset && offset <= record.limit);
      require(record.stored_nbytes <= record.limit - offset);
    } catch (const ptsave::FormatError& error) {
      require(error.record() == record.name && error.offset() == record.header_offset);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  const std::span file(reinterpret_cast<const std::byte*>(data), nbytes);
  try {
    const auto tail = file.last(std::min<std::size_t>(nbytes, ptsave::kMaxTailNbytes));
    const ptsave::CentralDirectory where = ptsave::find_central_directory(tail, nbytes);
    require(where.offset <= nbytes && where.nbytes <= nbytes - where.offset);
    const ptsave::ArchiveIndex index =
        ptsave::parse_central_directory(file.subspan(static_cast<std::size_t>(where.offset),
                                                     static_cast<std::size_t>(where.nbytes)),
                                        where);
    require(index.records().size() <= where.n_records);
    for (std::size_t i = 0; i < index.records().size(); ++i) check_record(file, index, i);
  } catch (const ptsave::FormatError& error) {
    require(!error.reason().empty() && !error.detail().empty());
  }
  return 0;
}
