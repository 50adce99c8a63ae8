#include "core/reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/crc32.h"
#include "core/error.h"
#include "core/system.h"
#include "core/transfer.h"

namespace ptsave {

ArchiveSource::ArchiveSource(File file, std::uint64_t base_offset)
    : file_(std::move(file)), base_offset_(base_offset), name_(file_->path()) {
  const std::uint64_t file_nbytes = file_->nbytes();
  nbytes_ = file_nbytes > base_offset ? file_nbytes - base_offset : 0;
  if (base_offset % kPageNbytes == 0 && file_->direct_io_alignment().offset <= kPageNbytes) {
    direct_ = file_->open_direct_reader();
  }
}

ArchiveSource::ArchiveSource(const std::byte* data, std::uint64_t nbytes, std::string name)
    : memory_(data), nbytes_(nbytes), name_(std::move(name)) {}

void ArchiveSource::read_at(std::uint64_t offset, void* data, std::size_t nbytes) const {
  if (offset > nbytes_ || nbytes > nbytes_ - offset) {
    throw IoError(0, "read (beyond the end)", name_);
  }
  if (nbytes == 0) return;
  if (memory_ != nullptr) {
    std::memcpy(data, memory_ + offset, nbytes);
  } else {
    file_->read_at(base_offset_ + offset, data, nbytes);
  }
}

bool ArchiveSource::may_be_cached(std::uint64_t offset, std::size_t nbytes) const {
  return !direct_ || sys::cached_pages(file_->fd(), base_offset_ + offset, nbytes) != 0;
}

std::size_t ArchiveSource::read_cached(std::uint64_t offset, void* data, std::size_t nbytes) const {
  if (memory_ != nullptr || !direct_) {
    read_at(offset, data, nbytes);
    return nbytes;
  }
  const ssize_t n =
      sys::pread_nowait(file_->fd(), data, nbytes, static_cast<off_t>(base_offset_ + offset));
  return n < 0 ? 0 : static_cast<std::size_t>(n);
}

bool ArchiveSource::read_direct(std::uint64_t offset, void* data, std::size_t nbytes) const {
  if (!direct_) return false;
  const std::uint64_t end = std::min(offset + nbytes, align_up(nbytes_, kPageNbytes));
  auto* bytes = static_cast<std::byte*>(data);
  while (offset < end && offset < nbytes_) {
    const ssize_t n =
        sys::pread(direct_.get(), bytes, end - offset, static_cast<off_t>(base_offset_ + offset));
    if (n < 0 && errno == EINTR) continue;
    // Whatever the reason, the buffered read that follows works or reports it.
    if (n <= 0) return false;
    const auto advance = static_cast<std::size_t>(n);
    if (offset + advance < nbytes_ && advance % kPageNbytes != 0) return false;
    bytes += advance;
    offset += advance;
  }
  return true;
}

namespace {

// The size that the directory claims for any other record is not bounded by the file's.
void require_stored(const IndexedRecord& record) {
  if (record.stored() && !record.encrypted()) return;
  throw FormatError("PytorchStreamReader failed retrieving file meta-data for " + record.name +
                        ": " +
                        (record.encrypted() ? "unsupported encryption" : "unsupported method"),
                    "the member cannot be read", record.name, record.header_offset);
}

ArchiveIndex read_index(const ArchiveSource& source) {
  std::vector<std::byte> tail(std::min(source.nbytes(), kMaxTailNbytes));
  source.read_at(source.nbytes() - tail.size(), tail.data(), tail.size());
  const CentralDirectory where = find_central_directory(tail, source.nbytes());
  // Not a vector, which would fill it with zeros first.
  const auto directory = std::make_unique_for_overwrite<std::byte[]>(where.nbytes);
  source.read_at(where.offset, directory.get(), where.nbytes);
  return parse_central_directory({directory.get(), static_cast<std::size_t>(where.nbytes)}, where);
}

}  // namespace

ArchiveReader::ArchiveReader(ArchiveSource source)
    : source_(std::move(source)), index_(read_index(source_)) {}

ArchiveReader::~ArchiveReader() = default;

std::uint64_t ArchiveReader::payload_offset(std::size_t i) const {
  const IndexedRecord& record = index_.records()[i];
  const std::uint64_t limit = record.limit;
  const std::size_t full_name_nbytes = index_.root().size() + 1 + record.name.size();
  std::vector<std::byte> header(
      std::min<std::uint64_t>(kLocalHeaderNbytes + full_name_nbytes, limit - record.header_offset));
  source_.read_at(record.header_offset, header.data(), header.size());
  return ptsave::payload_offset(header, record, index_.root().size(), limit);
}

std::uint64_t ArchiveReader::stored_payload_offset(std::size_t i) const {
  const std::uint64_t offset = payload_offset(i);
  require_stored(index_.records()[i]);
  return offset;
}

void ArchiveReader::read(std::size_t i, std::uint64_t offset, void* payload, bool verify) const {
  const IndexedRecord& record = index_.records()[i];
  const bool compare = verify && index_.has_crcs();
  std::uint32_t crc = 0;
  for (std::uint64_t done = 0; done < record.nbytes;) {
    std::byte* const place = static_cast<std::byte*>(payload) + done;
    const std::size_t nbytes = std::min<std::uint64_t>(kCachePieceNbytes, record.nbytes - done);
    source_.read_at(offset + done, place, nbytes);
    if (compare) crc = crc32(crc, place, nbytes);
    done += nbytes;
  }
  if (compare && crc != record.crc) {
    throw FormatError("CRC-32 mismatch", "the record is damaged", record.name, offset);
  }
}

void ArchiveReader::start(const std::vector<std::size_t>& records, std::size_t n_threads,
                          bool verify, bool exact_offsets) {
  std::vector<WantedRecord> wanted;
  wanted.reserve(records.size());
  for (const std::size_t i : records) {
    const IndexedRecord& record = index_.records()[i];
    require_stored(record);
    if (record.nbytes == 0) continue;
    wanted.push_back({i, exact_offsets ? payload_offset(i) : record.payload_offset});
  }
  transfer_ = std::make_unique<Transfer>(source_, index_, std::move(wanted), n_threads, verify);
}

void ArchiveReader::wait(std::size_t i, const Poll& poll) {
  if (index_.records()[i].nbytes > 0) transfer_->wait(i, poll);
}

std::vector<DamagedRecord> ArchiveReader::wait_all(const Poll& poll) {
  return transfer_->wait_all(poll);
}

LoadedPayload ArchiveReader::payload(std::size_t i) const {
  return index_.records()[i].nbytes > 0 ? transfer_->payload(i) : LoadedPayload{};
}

std::uint64_t ArchiveReader::nbytes_read() const { return transfer_->nbytes_read(); }

std::uint64_t ArchiveReader::nbytes_to_read() const { return transfer_->nbytes_to_read(); }

void ArchiveReader::cancel() {
  if (transfer_) transfer_->cancel();
}

}  // namespace ptsave
