#include "core/write/file_plan.h"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "core/base/owner.h"
#include "core/crc/crc32.h"
#include "core/io/file.h"
#include "core/memory/pages.h"

namespace ptsave {

void FilePlan::write_file(const Replacement& target, const WriteOptions& options,
                          const Poll& poll) {
  run(options, [&](const WriteOptions& write) {
    AtomicFile replacement(target.path, target.display);
    File& file = replacement.file();
    write_to(file, write, poll);
    try {
      replacement.commit(target.durable);
    } catch (const IoError&) {
      if (arriving_ != nullptr) complete_ = File::duplicate(file.fd(), target.display);
      throw;
    }
  });
}

void FilePlan::write_in_place(const std::string& path, std::optional<int> scratch, bool durable,
                              const WriteOptions& options, const Poll& poll) {
  run(options, [&](const WriteOptions& write) {
    const auto write_it = [&](File& file) { write_to(file, write, poll); };
    std::optional<File> first;
    if (scratch) first = File::duplicate(*scratch, path);
    if (complete_) {
      overwrite(path, &*complete_, nbytes(), durable, [](File& /*complete*/) {}, poll);
      progress_ = nbytes();
      return;
    }
    overwrite(path, first ? &*first : nullptr, has_holes() ? 0 : nbytes(), durable, write_it, poll);
  });
}

void FilePlan::write_stream(const StreamSink& sink, const WriteOptions& options) {
  run(options, [&](const WriteOptions& write) {
    const auto body = make_body(write, write.chunk_nbytes);
    write_to_stream(*body, sink, write, progress_);
  });
}

void FilePlan::write_to(File& file, const WriteOptions& options, const Poll& poll) {
  if (!has_holes()) file.preallocate(nbytes());
  const auto body = make_body(options, direct_chunk_nbytes(file, options));
  write_to_file(*body, file, 0, options, progress_, poll);
}

void PlannedRecords::add_made(std::string&& name, std::uint64_t nbytes, Maker make) {
  makers_.emplace(specs_.size(), std::move(make));
  add_staged(std::move(name), nbytes);
}

void PlannedRecords::add_staged(std::string&& name, std::uint64_t nbytes) {
  specs_.push_back({std::move(name), nbytes});
  addresses_.push_back(nullptr);
}

void PlannedRecords::reserve(std::size_t n_records) {
  specs_.reserve(n_records);
  addresses_.reserve(n_records);
}

ArchivePlan::ArchivePlan(const std::string& root, PlannedRecords records, std::uint64_t alignment,
                         std::unique_ptr<PayloadStaging> staging)
    : records_(std::move(records)),
      layout_(plan(root, records_.specs_, alignment)),
      staging_(std::move(staging)),
      payloads_([this](std::size_t record) { return payload(record); }) {
  records_.specs_ = {};  // the layout has all of them
}

std::vector<DamagedPayload> ArchivePlan::damaged() const {
  return staging_ ? staging_->damaged() : std::vector<DamagedPayload>{};
}

void ArchivePlan::read_from(SharedSources sources, std::span<const NamedSource> payloads) {
  if (staging_ != nullptr || staged_ahead_ != nullptr) {
    throw std::invalid_argument("the payloads come from somewhere else");
  }
  std::unordered_map<std::string_view, std::size_t> numbers;
  for (std::size_t i = 0; i < layout_.size(); ++i) numbers.emplace(layout_.name(i), i);
  std::vector<SourcePayload> by_record(layout_.size());
  for (const NamedSource& each : payloads) {
    const auto found = numbers.find(each.record);
    if (found == numbers.end()) throw std::invalid_argument("no such record: " + each.record);
    by_record[found->second] = each.payload;
  }
  staging_ = std::make_unique<SourcedPayloads>(std::move(sources), std::move(by_record));
}

void ArchivePlan::begin_staging(std::size_t chunk_nbytes) {
  if (staging_ == nullptr) return;
  std::unique_ptr<Stager> stager = staging_->hand_over();
  if (stager == nullptr) return;
  staging_.reset();
  staged_ahead_ = std::make_unique<StagedAhead>(layout_, std::move(stager), chunk_nbytes);
}

void ArchivePlan::stage(std::size_t n_threads, const Poll& poll) {
  if (staged_ahead_ != nullptr) staged_ahead_->run(n_threads, poll);
}

void ArchivePlan::release() {
  is_released_ = true;
  staging_.reset();
  staged_ahead_.reset();
  records_.makers_.clear();
  records_.owners_.clear();
  release_arriving();
}

void ArchivePlan::abandon() {
  if (staging_ != nullptr) staging_->abandon();
  keep_for_ever(std::move(staged_ahead_));
  release();
}

const std::byte* ArchivePlan::payload(std::size_t record) {
  const std::byte*& address = records_.addresses_[record];
  if (records_.makers_.empty() || record == made_) return address;
  if (const auto make = records_.makers_.find(record); make != records_.makers_.end()) {
    address = make->second();
    made_ = record;
  }
  return address;
}

std::unique_ptr<Stager> ArchivePlan::begin_write(WriteOptions& options) {
  if (is_released_) throw std::invalid_argument("the plan was released");
  made_ = kNone;
  if (is_sequential()) options.n_threads = options.n_direct_threads = 0;
  if (staging_ != nullptr) return staging_->begin_write(options);
  options.stager = staged_ahead_.get();
  return nullptr;
}

std::unique_ptr<FileBody> ArchivePlan::make_body(const WriteOptions& options,
                                                 std::size_t chunk_nbytes) const {
  auto body = std::make_unique<ArchiveBody>(layout_, payloads_, options.stager,
                                            options.compute_crcs, chunk_nbytes);
  body->follow(options.arriving);
  return body;
}

void ArchivePlan::write_descriptor(int fd, std::uint64_t offset, const std::string& name,
                                   bool durable, const WriteOptions& options, const Poll& poll) {
  run(options, [&](const WriteOptions& write) {
    File file = File::duplicate(fd, name);
    write_buffered(layout_, payloads_, file, offset, write, progress(), poll);
    if (durable) file.sync();
  });
}

void ArchivePlan::write_memory(std::span<std::byte> target, const WriteOptions& options,
                               const Poll& poll) {
  if (target.size() != nbytes()) {
    throw std::invalid_argument("the buffer's size is not the archive's");
  }
  run(options, [&](const WriteOptions& write) {
    write_to_memory(layout_, payloads_, target.data(), write, progress(), poll);
  });
}

PackedBody::PackedBody(const std::string& header, std::span<const std::uint64_t> payload_nbytes,
                       Stager& stager, bool compute_crcs, std::size_t chunk_nbytes)
    : FileBody(std::accumulate(payload_nbytes.begin(), payload_nbytes.end(),
                               std::uint64_t{header.size()}),
               chunk_nbytes),
      header_(header),
      stager_(stager),
      compute_crcs_(compute_crcs),
      pieces_(n_chunks()),
      crcs_(payload_nbytes.size()) {
  std::uint64_t end = header.size();
  ends_.reserve(payload_nbytes.size());
  for (const std::uint64_t nbytes : payload_nbytes) ends_.push_back(end += nbytes);
}

std::vector<PayloadPiece> PackedBody::pieces_of(std::size_t chunk) const {
  const ByteRange range = chunk_range(chunk);
  std::vector<PayloadPiece> pieces;
  const auto first = std::ranges::upper_bound(ends_, range.begin);
  for (auto i = static_cast<std::size_t>(first - ends_.begin()); i < ends_.size(); ++i) {
    const ByteRange payload{i == 0 ? header_.size() : ends_[i - 1], ends_[i]};
    if (payload.begin >= range.end) break;
    const ByteRange part = intersect(range, payload);
    if (!part.empty()) pieces.push_back({i, part.begin - payload.begin, part.nbytes()});
  }
  return pieces;
}

void PackedBody::produce(ChunkPipeline& /*pipeline*/, std::size_t chunk, ChunkSink& sink) {
  const ByteRange header = intersect(chunk_range(chunk), {0, header_.size()});
  if (!header.empty()) {
    sink.put_seam(reinterpret_cast<const std::byte*>(header_.data()) + header.begin,
                  header.nbytes());
  }
  const std::vector<PayloadPiece> pieces = pieces_of(chunk);
  if (pieces.empty()) return;
  std::unique_ptr<StagedPieces> staged;
  if (arriving_ == nullptr) staged = stager_.stage(chunk, pieces);
  const std::byte* data = staged != nullptr ? staged->data() : nullptr;
  for (const PayloadPiece& piece : pieces) {
    std::uint32_t crc = 0;
    const auto use = [&](std::span<const std::byte> bytes) {
      crc = sink.put_payload(bytes.data(), bytes.size(), crc);
    };
    if (staged != nullptr) {
      use({data, piece.nbytes});
      data += piece.nbytes;
    } else {
      arriving_->read(stager_.in_memory(piece), piece.nbytes, use);
    }
    if (compute_crcs_) pieces_[chunk].push_back({piece.record, piece.nbytes, crc});
  }
}

std::string PackedBody::tail() {
  for (const std::vector<PieceCrc>& chunk : pieces_) {
    for (const auto& [payload, nbytes, crc] : chunk) {
      crcs_[payload] = crc32_combine(crcs_[payload], crc, nbytes);
    }
  }
  return {};
}

PackedPlan::PackedPlan(std::string header, std::vector<std::uint64_t> payload_nbytes,
                       std::unique_ptr<PayloadStaging> payloads)
    : header_(std::move(header)),
      payload_nbytes_(std::move(payload_nbytes)),
      payloads_(std::move(payloads)) {}

std::uint64_t PackedPlan::nbytes() const {
  return std::accumulate(payload_nbytes_.begin(), payload_nbytes_.end(),
                         std::uint64_t{header_.size()});
}

std::unique_ptr<Stager> PackedPlan::begin_write(WriteOptions& options) {
  return payloads_->begin_write(options);
}

std::unique_ptr<FileBody> PackedPlan::make_body(const WriteOptions& options,
                                                std::size_t chunk_nbytes) const {
  auto body = std::make_unique<PackedBody>(header_, payload_nbytes_, *options.stager,
                                           options.compute_crcs, chunk_nbytes);
  body->follow(options.arriving);
  return body;
}

namespace {

constexpr std::uint64_t kBlock = kCheckedBlockNbytes;

// Cuts bytes into blocks and records their checksums.
class CheckedSink {
 public:
  // `offset` is a block's.
  CheckedSink(ChunkSink& sink, std::uint64_t offset, std::vector<std::uint32_t>& crcs)
      : sink_(sink), at_(offset), crcs_(crcs) {}

  void put(const std::byte* data, std::uint64_t nbytes) {
    while (nbytes > 0) {
      const std::uint64_t n = std::min(nbytes, kBlock - at_ % kBlock);
      crc_ = sink_.put_payload(data, n, crc_);
      at_ += n;
      data += n;
      nbytes -= n;
      if (at_ % kBlock == 0) {
        crcs_[at_ / kBlock - 1] = crc_;
        crc_ = 0;
      }
    }
  }
  void put_zeros_until(std::uint64_t end) {
    static constexpr std::array<std::byte, kBlock> kZeros{};
    while (at_ < end) put(kZeros.data(), std::min(end - at_, kBlock));
  }

 private:
  ChunkSink& sink_;
  std::uint64_t at_;
  std::uint32_t crc_ = 0;
  std::vector<std::uint32_t>& crcs_;
};

}  // namespace

CheckedBody::CheckedBody(std::span<const PlacedPiece> pieces, Stager* stager,
                         std::size_t chunk_nbytes)
    : FileBody(nbytes_of(pieces), chunk_nbytes),
      pieces_(pieces),
      stager_(stager),
      crcs_(nbytes() / kBlock) {}

std::uint64_t CheckedBody::nbytes_of(std::span<const PlacedPiece> pieces) {
  return pieces.empty() ? 0 : align_up(pieces.back().end(), kBlock);
}

std::vector<std::size_t> CheckedBody::pieces_of(ByteRange range) const {
  std::vector<std::size_t> found;
  const auto first = std::ranges::upper_bound(pieces_, range.begin, {}, &PlacedPiece::end);
  for (auto i = static_cast<std::size_t>(first - pieces_.begin());
       i < pieces_.size() && pieces_[i].offset < range.end; ++i) {
    if (pieces_[i].nbytes > 0) found.push_back(i);
  }
  return found;
}

void CheckedBody::produce(ChunkPipeline& /*pipeline*/, std::size_t chunk, ChunkSink& sink) {
  const ByteRange range = chunk_range(chunk);
  const std::vector<std::size_t> found = pieces_of(range);
  const auto part_of = [&](std::size_t i) {
    return intersect(range, {pieces_[i].offset, pieces_[i].end()});
  };
  std::vector<PayloadPiece> to_stage;
  for (const std::size_t i : found) {
    const ByteRange part = part_of(i);
    if (pieces_[i].data == nullptr) {
      to_stage.push_back({i, part.begin - pieces_[i].offset, part.nbytes()});
    }
  }
  std::unique_ptr<StagedPieces> staged;
  if (!to_stage.empty()) staged = stager_->stage(chunk, to_stage);
  const std::byte* next = staged ? staged->data() : nullptr;
  CheckedSink out(sink, range.begin, crcs_);
  for (const std::size_t i : found) {
    const ByteRange part = part_of(i);
    out.put_zeros_until(part.begin);
    if (pieces_[i].data != nullptr) {
      out.put(pieces_[i].data + (part.begin - pieces_[i].offset), part.nbytes());
    } else {
      out.put(next, part.nbytes());
      next += part.nbytes();
    }
  }
  out.put_zeros_until(range.end);
}

// All supported machines are little-endian.
std::string CheckedBody::tail() {
  return {reinterpret_cast<const char*>(crcs_.data()), crcs_.size() * sizeof(std::uint32_t)};
}

CheckedPlan::CheckedPlan(std::vector<PlacedPiece> pieces, std::unique_ptr<PayloadStaging> staging)
    : pieces_(std::move(pieces)), staging_(std::move(staging)) {
  for (std::size_t i = 1; i < pieces_.size(); ++i) {
    if (pieces_[i].offset < pieces_[i - 1].end()) {
      throw std::invalid_argument("pieces of a file overlap, or are not in its order");
    }
  }
}

std::uint64_t CheckedPlan::nbytes() const {
  const std::uint64_t nbytes = CheckedBody::nbytes_of(pieces_);
  return nbytes + nbytes / kCheckedBlockNbytes * sizeof(std::uint32_t);
}

std::unique_ptr<Stager> CheckedPlan::begin_write(WriteOptions& options) {
  options.chunk_nbytes =
      std::max(align_down(options.chunk_nbytes, kCheckedBlockNbytes), kCheckedBlockNbytes);
  std::unique_ptr<Stager> stager = staging_ ? staging_->begin_write(options) : nullptr;
  options.compute_crcs = true;
  // Replaces the staging's comparison, because these are checksums of blocks, not of pieces.
  options.check_crcs = [this](std::span<const std::uint32_t> crcs) {
    block_crcs_.assign(crcs.begin(), crcs.end());
  };
  return stager;
}

std::unique_ptr<FileBody> CheckedPlan::make_body(const WriteOptions& options,
                                                 std::size_t chunk_nbytes) const {
  return std::make_unique<CheckedBody>(pieces_, options.stager, chunk_nbytes);
}

}  // namespace ptsave
