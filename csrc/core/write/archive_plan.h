// The plan of an archive: its records in order, their layout, and where their payloads are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/format/archive.h"
#include "core/write/archive_body.h"
#include "core/write/file_plan.h"
#include "core/write/sourced_payloads.h"
#include "core/write/staged_chunks.h"

namespace ptsave {

// Records that are to be written, in order.
class PlannedRecords {
 public:
  // Makes a payload when its turn comes and returns its address; it stays until the next one is
  // made.  May throw.
  using Maker = std::function<const std::byte*()>;

  // A payload in memory, which must stay there until the plan is released; null for a hole.
  void add(std::string&& name, std::uint64_t nbytes, const std::byte* data) {
    has_holes_ |= data == nullptr && nbytes > 0;
    specs_.push_back({std::move(name), nbytes});
    addresses_.push_back(data);
  }
  void add_made(std::string&& name, std::uint64_t nbytes, Maker make);
  // One that the plan's PayloadStaging brings.
  void add_staged(std::string&& name, std::uint64_t nbytes);
  // Lives until the plan is released.
  void keep(std::shared_ptr<const void> owner) { owners_.push_back(std::move(owner)); }

  std::size_t size() const { return specs_.size(); }
  void reserve(std::size_t n_records);

 private:
  friend class ArchivePlan;

  std::vector<RecordSpec> specs_;
  std::vector<const std::byte*> addresses_;
  std::unordered_map<std::size_t, Maker> makers_;
  std::vector<std::shared_ptr<const void>> owners_;
  bool has_holes_ = false;
};

class ArchivePlan final : public FilePlan {
 public:
  // A record's payload that is a part of a source.
  struct NamedSource {
    std::string record;
    SourcePayload payload;
  };

  // `staging`, for records that were added as staged, may be null.
  ArchivePlan(const std::string& root, PlannedRecords records, std::uint64_t alignment,
              std::unique_ptr<PayloadStaging> staging = nullptr);

  std::uint64_t nbytes() const override { return layout_.nbytes(); }
  std::string record_name(std::size_t record) const { return std::string(layout_.name(record)); }
  bool has_holes() const override { return records_.has_holes_; }
  bool is_sequential() const override { return !records_.makers_.empty(); }
  bool is_pinned() const override {
    return staged_ahead_ != nullptr || (staging_ != nullptr && staging_->is_pinned());
  }
  std::vector<DamagedPayload> damaged() const override;

  // These records' payloads come from parts of sources.  std::invalid_argument if payloads are
  // staged already, or for a record that is not there.
  void read_from(SharedSources sources, std::span<const NamedSource> payloads);
  // Payloads on accelerators will be written as the current streams of this thread leave them now,
  // in chunks of this size.
  void begin_staging(std::size_t chunk_nbytes);
  // Copies all of them to the host: the plan does not need the accelerators' memory after.
  void stage(std::size_t n_threads, const Poll& poll);

  // Lets go of all payloads.  A write is std::invalid_argument after.
  void release();
  // The same in a forked child, which leaks its copies of accelerators' objects: freeing
  // page-locked memory calls the driver, which is the parent's.
  void abandon();

  // Into an open file, which stays the caller's, from `offset` on.
  void write_descriptor(int fd, std::uint64_t offset, const std::string& name, bool durable,
                        const WriteOptions& options, const Poll& poll);
  // std::invalid_argument if the memory is not of nbytes().
  void write_memory(std::span<std::byte> target, const WriteOptions& options, const Poll& poll);

 protected:
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                      std::size_t chunk_nbytes) const override;

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  const std::byte* payload(std::size_t record);

  PlannedRecords records_;
  ArchiveLayout layout_;
  std::unique_ptr<PayloadStaging> staging_;
  std::unique_ptr<StagedAhead> staged_ahead_;
  std::size_t made_ = kNone;
  bool is_released_ = false;
  Payloads payloads_;
};

}  // namespace ptsave
