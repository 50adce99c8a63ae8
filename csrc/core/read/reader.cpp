#include "core/read/reader.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/memory/pages.h"
#include "core/read/placement.h"
#include "core/read/transfer.h"

namespace ptsave {
namespace {

constexpr std::string_view kFolder = "data/";

}  // namespace

DataRecords::DataRecords(const ArchiveIndex& index) : index_(index) {
  for (std::size_t i = 0; i < index.records().size(); ++i) {
    const bool is_storage = index.records()[i].name.starts_with(kFolder);
    (is_storage ? storages_ : others_).push_back(i);
  }
}

bool DataRecords::have_crcs() const {
  const auto is_filled = [&](std::size_t i) { return index_.records()[i].nbytes > 0; };
  const auto has_crc = [&](std::size_t i) { return is_filled(i) && index_.records()[i].crc != 0; };
  return std::ranges::any_of(storages_, has_crc) || std::ranges::none_of(storages_, is_filled);
}

std::size_t DataRecords::find(std::string_view key) {
  const auto records = index_.records();
  if (++last_found_ < records.size()) {
    const std::string_view next = records[last_found_].name;
    if (next.starts_with(kFolder) && next.substr(kFolder.size()) == key) return last_found_;
  }
  return last_found_ = index_.find(std::string(kFolder).append(key));
}

namespace {

// Refuses compressed or encrypted records: the file's size does not bound the size they claim.
void require_stored(const IndexedRecord& record, const ByteSource& source) {
  if (record.stored() && !record.encrypted()) return;
  throw FormatError("PytorchStreamReader failed retrieving file meta-data for " + record.name +
                        ": " +
                        (record.encrypted() ? "unsupported encryption" : "unsupported method"),
                    "the member cannot be read", record.name, record.header_offset, source.name());
}

ArchiveIndex read_index(const ByteSource& source) {
  std::vector<std::byte> tail(std::min(source.nbytes(), kMaxTailNbytes));
  source.read_at(source.nbytes() - tail.size(), tail.data(), tail.size());
  const CentralDirectory where = find_central_directory(tail, source.nbytes());
  // A vector would fill it with zeros first.
  const auto directory = std::make_unique_for_overwrite<std::byte[]>(where.nbytes);
  source.read_at(where.offset, directory.get(), where.nbytes);
  return parse_central_directory({directory.get(), static_cast<std::size_t>(where.nbytes)}, where);
}

}  // namespace

std::vector<Destination> whole_payloads(const ArchiveIndex& index,
                                        std::span<const std::size_t> records,
                                        std::span<const std::span<std::byte>> memory) {
  if (memory.empty()) return {};
  if (memory.size() != records.size()) throw std::invalid_argument("not one target per record");
  std::vector<Destination> destinations;
  for (std::size_t k = 0; k < records.size(); ++k) {
    if (memory[k].size() != index.records()[records[k]].nbytes) {
      throw std::invalid_argument("a target does not have its record's size");
    }
    if (memory[k].empty()) continue;
    destinations.push_back({records[k], 0, memory[k].size(), memory[k].data()});
  }
  return destinations;
}

ArchiveReader::ArchiveReader(ByteSource source)
    : source_(std::move(source)),
      index_(naming_file(source_.name(), [&] { return read_index(source_); })) {}

ArchiveReader::~ArchiveReader() = default;

void ArchiveReader::exchange(ByteSource source) {
  if (source.nbytes() != source_.nbytes()) throw std::invalid_argument("not the same archive");
  transfer_.reset();  // it refers to the source
  source_ = std::move(source);
}

std::uint64_t ArchiveReader::payload_offset(std::size_t i) const {
  const IndexedRecord& record = index_.records()[i];
  const std::uint64_t limit = record.limit;
  const std::size_t full_name_nbytes = index_.root().size() + 1 + record.name.size();
  std::vector<std::byte> header(
      std::min<std::uint64_t>(kLocalHeaderNbytes + full_name_nbytes, limit - record.header_offset));
  source_.read_at(record.header_offset, header.data(), header.size());
  return naming_file(source_.name(), [&] {
    return ptsave::payload_offset(header, record, index_.root().size(), limit);
  });
}

std::uint64_t ArchiveReader::stored_payload_offset(std::size_t i) const {
  const std::uint64_t offset = payload_offset(i);
  require_stored(index_.records()[i], source_);
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
    throw FormatError("CRC-32 mismatch", "the record is damaged", record.name, offset,
                      source_.name());
  }
}

std::vector<DamagedRecord> ArchiveReader::read_records(std::vector<std::size_t> records,
                                                       const std::vector<Destination>& destinations,
                                                       std::size_t n_threads, bool verify,
                                                       const Poll& poll, Unstager* unstager) const {
  std::ranges::sort(records);
  records.erase(std::unique(records.begin(), records.end()), records.end());
  for (const bool exact_offsets : {false, true}) {
    const std::shared_ptr<const TransferPlan> wanted = plan(records, exact_offsets);
    auto scatter = std::make_shared<Scatter>(wanted, destinations, verify, nullptr, unstager);
    try {
      Transfer transfer(source_, index_, wanted, std::move(scatter), n_threads, verify);
      return transfer.wait_all(poll);
    } catch (const LayoutMismatch&) {
      if (exact_offsets) throw;
      if (unstager != nullptr) unstager->drain();  // as in fill()
    }
  }
  return {};
}

void ArchiveReader::read_range(std::uint64_t offset, std::byte* to, std::size_t nbytes,
                               std::size_t n_threads, const Poll& poll) const {
  const std::size_t n_chunks = (nbytes + kMaxChunkNbytes - 1) / kMaxChunkNbytes;
  const auto read_chunk = [&](std::size_t chunk) {
    const std::size_t begin = chunk * kMaxChunkNbytes;
    source_.read_at(offset + begin, to + begin, std::min(kMaxChunkNbytes, nbytes - begin));
  };
  run_chunks(n_chunks, n_chunks > 1 ? n_threads : 0, read_chunk, poll);
}

std::shared_ptr<const TransferPlan> ArchiveReader::plan(const std::vector<std::size_t>& records,
                                                        bool exact_offsets) const {
  std::vector<WantedRecord> wanted;
  wanted.reserve(records.size());
  for (const std::size_t i : records) {
    const IndexedRecord& record = index_.records()[i];
    require_stored(record, source_);
    if (record.nbytes == 0) continue;
    wanted.push_back({i, exact_offsets ? payload_offset(i) : record.payload_offset});
  }
  return std::make_shared<TransferPlan>(plan_transfer(index_, std::move(wanted), page_nbytes()));
}

void ArchiveReader::start(const std::vector<std::size_t>& records, std::size_t n_threads,
                          bool verify, bool exact_offsets) {
  const std::shared_ptr<const TransferPlan> wanted = plan(records, exact_offsets);
  region_ = std::make_shared<Region>(wanted, verify, Use::kAll);
  transfer_ = std::make_unique<Transfer>(source_, index_, wanted, region_, n_threads, verify);
}

void ArchiveReader::reserve(const std::vector<std::size_t>& records) {
  transfer_.reset();
  region_ = std::make_shared<Region>(plan(records, /*exact_offsets=*/false), /*verify=*/false,
                                     Use::kParts);
}

std::vector<DamagedRecord> ArchiveReader::fill(const std::vector<Destination>& destinations,
                                               std::size_t n_threads, bool verify, const Poll& poll,
                                               Unstager* unstager) {
  std::vector<Destination> parts;
  std::vector<bool> is_wanted(index_.records().size());
  for (const Destination& destination : destinations) {
    const std::uint64_t nbytes = index_.records()[destination.record].nbytes;
    if (destination.offset > nbytes || destination.nbytes > nbytes - destination.offset) {
      throw std::invalid_argument("a destination reaches beyond its record");
    }
    if (destination.nbytes == 0) continue;
    parts.push_back(destination);
    is_wanted[destination.record] = true;
  }
  std::vector<std::size_t> records;
  for (std::size_t i = 0; i < is_wanted.size(); ++i) {
    if (is_wanted[i]) records.push_back(i);
  }
  for (const bool exact_offsets : {false, true}) {
    const std::shared_ptr<const TransferPlan> wanted = plan(records, exact_offsets);
    auto scatter = std::make_shared<Scatter>(wanted, parts, verify, region_, unstager);
    transfer_ =
        std::make_unique<Transfer>(source_, index_, wanted, std::move(scatter), n_threads, verify);
    try {
      std::vector<DamagedRecord> damaged = transfer_->wait_all(poll);
      transfer_->cancel();
      return damaged;
    } catch (const LayoutMismatch&) {
      if (exact_offsets) throw;
      // Wrong bytes must not arrive after the right bytes, and the leases are needed again.
      if (unstager != nullptr) unstager->drain();
      transfer_.reset();
    } catch (...) {
      transfer_->cancel();  // after this, no worker writes to the caller's memory
      throw;
    }
  }
  return {};
}

std::vector<std::size_t> ArchiveReader::begun() const {
  return transfer_ ? transfer_->begun() : std::vector<std::size_t>{};
}

void ArchiveReader::wait(std::size_t i, const Poll& poll) {
  if (index_.records()[i].nbytes > 0) transfer_->wait(i, poll);
}

std::vector<DamagedRecord> ArchiveReader::wait_all(const Poll& poll) {
  return transfer_->wait_all(poll);
}

LoadedPayload ArchiveReader::payload(std::size_t i) const {
  return index_.records()[i].nbytes > 0 ? region_->payload(i) : LoadedPayload{};
}

void ArchiveReader::discard(std::size_t i) const {
  if (index_.records()[i].nbytes > 0) region_->discard(i);
}

std::uint64_t ArchiveReader::nbytes_read() const {
  return transfer_ ? transfer_->nbytes_read() : 0;
}

std::uint64_t ArchiveReader::nbytes_to_read() const {
  return transfer_ ? transfer_->nbytes_to_read() : 0;
}

void ArchiveReader::cancel() {
  if (transfer_) transfer_->cancel();
}

}  // namespace ptsave
