#include "core/write/archive_plan.h"

#include <stdexcept>
#include <string_view>
#include <utility>

#include "core/base/keep_for_ever.h"
#include "core/io/file.h"

namespace ptsave {

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

}  // namespace ptsave
