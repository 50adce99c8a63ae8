// The plan of an archive: its records in order, their layout, and the places of their payloads.
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

// The records to write, in order.
class PlannedRecords {
 public:
  // Makes a payload when it is needed and returns its address, which is valid until the next
  // payload is made.  May throw.
  using Maker = std::function<const std::byte*()>;

  // Adds a payload that stays in memory until the plan is released; null for a hole.
  void add(std::string&& name, std::uint64_t nbytes, const std::byte* data) {
    has_holes_ |= data == nullptr && nbytes > 0;
    specs_.push_back({std::move(name), nbytes});
    addresses_.push_back(data);
  }
  void add_made(std::string&& name, std::uint64_t nbytes, Maker make);
  // Adds a payload that the plan's PayloadStaging brings.
  void add_staged(std::string&& name, std::uint64_t nbytes);
  // Keeps `owner` alive until the plan is released.
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
  // A record whose payload is a part of a source.
  struct NamedSource {
    std::string record;
    SourcePayload payload;
  };

  // `staging` brings staged records; null if there are none.
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

  // Takes these records' payloads from sources.  Throws std::invalid_argument if payloads are
  // already staged, or for an unknown record.
  void read_from(SharedSources sources, std::span<const NamedSource> payloads);
  // Fixes the accelerators' payloads to their values after the work now on this thread's current
  // streams; they are staged in chunks of this size.
  void begin_staging(std::size_t chunk_nbytes);
  // Copies these payloads to the host; afterwards the plan does not need the accelerators' memory.
  void stage(std::size_t n_threads, const Poll& poll);

  // Releases all payloads; a later write throws std::invalid_argument.
  void release();
  // The same in a forked child, which leaks its copies of accelerators' objects, because freeing
  // page-locked memory would call the parent's driver.
  void abandon();

  // Writes into an open file, which stays the caller's, from `offset` on.
  void write_descriptor(int fd, std::uint64_t offset, const std::string& name, bool durable,
                        const WriteOptions& options, const Poll& poll);
  // Throws std::invalid_argument if the target's size is not nbytes().
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
