// Plans of files whose layout is known before their first byte is written: an archive, packed
// payloads, and pieces with checksums of blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/owner.h"
#include "core/crc/crc32.h"
#include "core/format/archive.h"
#include "core/io/file.h"
#include "core/memory/pages.h"
#include "core/pipeline/stager.h"
#include "core/write/file_body.h"
#include "core/write/payloads.h"
#include "core/write/sharing.h"
#include "core/write/writer.h"

namespace ptsave {

// A planned file.  Each write produces the whole file, so a failed write may be retried elsewhere.
// Only one write may run at a time.
class FilePlan : public Interface {
 public:
  // A file that appears complete or not at all; `display` is its name in errors.
  struct Replacement {
    std::string path;
    std::string display;
    bool durable = false;
  };

  virtual std::uint64_t nbytes() const = 0;
  // Whether payloads are left out as holes.
  virtual bool has_holes() const { return false; }
  // Whether payloads are made one at a time, without worker threads.
  virtual bool is_sequential() const { return false; }
  // Whether payloads come from accelerators, through page-locked memory.
  virtual bool is_pinned() const = 0;
  // The payloads with a wrong CRC, if the last write threw FormatError.
  virtual std::vector<DamagedPayload> damaged() const = 0;

  // Replaces or creates a file, which may share blocks with an older one.  Throws IoError,
  // FormatError.
  void write_file(const Replacement& target, WriteOptions options, const Poll& poll,
                  Sharing* sharing = nullptr) {
    options.sharing = has_holes() ? nullptr : sharing;
    run(options, [&](const WriteOptions& write) {
      AtomicFile replacement(target.path, target.display);
      File& file = replacement.file();
      write_to(file, write, poll);
      try {
        replacement.commit(target.durable);
        if (sharing != nullptr) sharing->end(file);
      } catch (const IoError&) {
        if (arriving_ != nullptr) complete_ = File::duplicate(file.fd(), target.display);
        throw;
      }
    });
  }

  // Lets the next write_file() read payloads while they are being copied.
  void follow(ArrivingPayloads& payloads) { arriving_ = &payloads; }

  // Overwrites a file in place, or creates it.  If payloads come from that same file, the bytes go
  // through `scratch`, the descriptor of an empty file.
  void write_in_place(const std::string& path, std::optional<int> scratch, bool durable,
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
      overwrite(path, first ? &*first : nullptr, has_holes() ? 0 : nbytes(), durable, write_it,
                poll);
    });
  }

  // Passes the file to `sink` piece by piece, on the calling thread.
  void write_stream(const StreamSink& sink, const WriteOptions& options) {
    run(options, [&](const WriteOptions& write) {
      begin_stream(write);
      const auto body = make_body(write, write.chunk_nbytes);
      write_to_stream(*body, sink, write, progress_);
    });
  }
  // Bytes that the last write has written so far.  Safe for concurrent use.
  std::uint64_t nbytes_written() const { return progress_.load(); }

 protected:
  // Completes the options of a write.  Returns the options' stager if it lives only for this write.
  virtual std::unique_ptr<Stager> begin_write(WriteOptions& options) = 0;
  // Completes bytes that depend on later ones, because a stream cannot be patched.
  virtual void begin_stream(const WriteOptions& /*options*/) {}
  // Makes the file's body for one write.
  virtual std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                              std::size_t chunk_nbytes) const = 0;

  // Releases the arriving payloads, and the complete file of a failed rename.
  void release_arriving() {
    arriving_ = nullptr;
    complete_.reset();
  }

  // Calls write(options) with the completed options of this write.
  template <typename Write>
  void run(WriteOptions options, const Write& write) {
    progress_ = 0;
    options.arriving = arriving_;
    const std::unique_ptr<Stager> stager = begin_write(options);
    write(std::as_const(options));
  }

  Progress progress_{0};

 private:
  void write_to(File& file, WriteOptions options, const Poll& poll) {
    if (options.sharing != nullptr && !options.sharing->begin(file, nbytes())) {
      options.sharing = nullptr;
    }
    if (!has_holes() && options.sharing == nullptr) file.preallocate(nbytes());
    const auto body = make_body(options, direct_chunk_nbytes(file, options));
    write_to_file(*body, file, 0, options, progress_, poll);
  }

  ArrivingPayloads* arriving_ = nullptr;
  // A complete file of arriving payloads whose rename failed: these payloads cannot be read again.
  std::optional<File> complete_;
};

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
  void add_made(std::string&& name, std::uint64_t nbytes, Maker make) {
    makers_.emplace(specs_.size(), std::move(make));
    add_staged(std::move(name), nbytes);
  }
  // Adds a payload that the plan's PayloadStaging brings.
  void add_staged(std::string&& name, std::uint64_t nbytes) {
    specs_.push_back({std::move(name), nbytes});
    addresses_.push_back(nullptr);
  }
  // Keeps `owner` alive until the plan is released.
  void keep(std::shared_ptr<const void> owner) { owners_.push_back(std::move(owner)); }

  std::size_t size() const { return specs_.size(); }
  void reserve(std::size_t n_records) {
    specs_.reserve(n_records);
    addresses_.reserve(n_records);
  }

 private:
  friend class ArchivePlan;

  std::vector<RecordSpec> specs_;
  std::vector<const std::byte*> addresses_;
  std::unordered_map<std::size_t, Maker> makers_;
  std::vector<std::shared_ptr<const void>> owners_;
  bool has_holes_ = false;
};

// The plan of an archive: the records' layout, and the places of their payloads.
class ArchivePlan final : public FilePlan {
 public:
  // A record whose payload is a part of a source.
  struct NamedSource {
    std::string record;
    SourcePayload payload;
  };

  // `staging` brings staged records; null if there are none.
  ArchivePlan(const std::string& root, PlannedRecords records, std::uint64_t alignment,
              std::unique_ptr<PayloadStaging> staging = nullptr)
      : records_(std::move(records)),
        layout_(plan(root, records_.specs_, alignment)),
        staging_(std::move(staging)),
        payloads_([this](std::size_t record) { return payload(record); }) {
    records_.specs_ = {};  // the layout has all of them
  }

  std::uint64_t nbytes() const override { return layout_.nbytes(); }
  // The place and the size of each record's payload.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> payload_places() const {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
    places.reserve(layout_.size());
    for (std::size_t i = 0; i < layout_.size(); ++i) {
      places.emplace_back(layout_.record(i).payload_offset, layout_.record(i).nbytes);
    }
    return places;
  }
  std::string record_name(std::size_t record) const { return std::string(layout_.name(record)); }
  bool has_holes() const override { return records_.has_holes_; }
  bool is_sequential() const override { return !records_.makers_.empty(); }
  bool is_pinned() const override {
    return staged_ahead_ != nullptr || (staging_ != nullptr && staging_->is_pinned());
  }
  std::vector<DamagedPayload> damaged() const override {
    return staging_ ? staging_->damaged() : std::vector<DamagedPayload>{};
  }

  // Takes these records' payloads from sources.  Throws std::invalid_argument if payloads are
  // already staged, or for an unknown record.
  void read_from(SharedSources sources, std::span<const NamedSource> payloads) {
    if (staging_ != nullptr || staged_ahead_ != nullptr) {
      throw std::invalid_argument("the payloads are already staged");
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

  // Prepares a write_file() that shares unchanged records with an archive that has these records.
  void prepare(Sharing& sharing, std::span<const IndexedRecord> base) const {
    sharing.plan(layout_, base);
  }

  // Freezes the values of payloads on accelerators: writes use the values after the work that is
  // now queued on this thread's current streams.  The payloads are staged in chunks of this size.
  void begin_staging(std::size_t chunk_nbytes) {
    if (staging_ == nullptr) return;
    std::unique_ptr<Stager> stager = staging_->hand_over();
    if (stager == nullptr) return;
    staging_.reset();
    staged_ahead_ = std::make_unique<StagedAhead>(layout_, std::move(stager), chunk_nbytes);
  }
  // Copies these payloads to the host; afterwards the plan does not need the accelerators' memory.
  void stage(std::size_t n_threads, const Poll& poll) {
    if (staged_ahead_ != nullptr) staged_ahead_->run(n_threads, poll);
  }

  // Releases all payloads; a later write throws std::invalid_argument.
  void release() {
    is_released_ = true;
    staging_.reset();
    staged_ahead_.reset();
    records_.makers_.clear();
    records_.owners_.clear();
    release_arriving();
  }
  // A forked child calls this instead of release().  Leaks copies of accelerators' objects, because
  // freeing page-locked memory would call the parent's driver.
  void abandon() {
    if (staging_ != nullptr) staging_->abandon();
    keep_for_ever(std::move(staged_ahead_));
    release();
  }

  // Writes into an open file from `offset` on.  The caller keeps the descriptor.
  void write_descriptor(int fd, std::uint64_t offset, const std::string& name, bool durable,
                        const WriteOptions& options, const Poll& poll) {
    run(options, [&](const WriteOptions& write) {
      File file = File::duplicate(fd, name);
      WriteOptions buffered = write;
      buffered.direct_nbytes.reset();
      const auto body = make_body(buffered, buffered.chunk_nbytes);
      write_to_file(*body, file, offset, buffered, progress_, poll);
      if (durable) file.sync();
    });
  }

  // Throws std::invalid_argument if the target's size is not nbytes().
  void write_memory(std::span<std::byte> target, const WriteOptions& options, const Poll& poll) {
    if (target.size() != nbytes()) {
      throw std::invalid_argument("the buffer does not have the archive's size");
    }
    run(options, [&](const WriteOptions& write) {
      const auto body = make_body(write, write.chunk_nbytes);
      write_to_memory(*body, target.data(), write, progress_, poll);
    });
  }

 protected:
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override {
    if (is_released_) throw std::invalid_argument("the plan was released");
    made_ = kNone;
    if (is_sequential()) options.n_threads = options.n_direct_threads = 0;
    if (staging_ != nullptr) return staging_->begin_write(options);
    options.stager = staged_ahead_.get();
    return nullptr;
  }
  std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                      std::size_t chunk_nbytes) const override {
    auto body = std::make_unique<ArchiveBody>(layout_, payloads_, options.stager,
                                              options.compute_crcs, chunk_nbytes);
    body->follow(options.arriving);
    return body;
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  const std::byte* payload(std::size_t record) {
    const std::byte*& address = records_.addresses_[record];
    if (records_.makers_.empty() || record == made_) return address;
    if (const auto make = records_.makers_.find(record); make != records_.makers_.end()) {
      address = make->second();
      made_ = record;
    }
    return address;
  }

  PlannedRecords records_;
  ArchiveLayout layout_;
  std::unique_ptr<PayloadStaging> staging_;
  std::unique_ptr<StagedAhead> staged_ahead_;
  std::size_t made_ = kNone;
  bool is_released_ = false;
  Payloads payloads_;
};

class PackedPlan final : public FilePlan {
 public:
  // `payload_nbytes` are the payloads' sizes; `payloads` brings all of them.  `crcs_at` is the
  // place of their CRCs in the header.  Throws std::invalid_argument if they do not fit there.
  PackedPlan(std::string header, std::vector<std::uint64_t> payload_nbytes,
             std::unique_ptr<PayloadStaging> payloads,
             std::optional<std::uint64_t> crcs_at = std::nullopt)
      : header_(std::move(header)),
        payload_nbytes_(std::move(payload_nbytes)),
        payloads_(std::move(payloads)),
        crcs_at_(crcs_at) {
    const std::uint64_t room =
        header_.size() - std::min<std::uint64_t>(crcs_at_.value_or(0), header_.size());
    if (crcs_at_ && room / PackedBody::kCrcNbytes < payload_nbytes_.size()) {
      throw std::invalid_argument("the checksums do not fit into the header");
    }
  }

  std::uint64_t nbytes() const override {
    return std::accumulate(payload_nbytes_.begin(), payload_nbytes_.end(),
                           std::uint64_t{header_.size()});
  }
  bool is_pinned() const override { return payloads_->is_pinned(); }
  std::vector<DamagedPayload> damaged() const override { return payloads_->damaged(); }

 protected:
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override {
    options.compute_crcs |= crcs_at_.has_value();
    return payloads_->begin_write(options);
  }
  void begin_stream(const WriteOptions& options) override {
    if (!crcs_at_) return;
    const auto body = make_body(options, options.chunk_nbytes);
    Progress ignored{0};
    write_to_stream(*body, [](const std::byte*, std::uint64_t) {}, options, ignored);
    const FileBody::Patch patch = body->patch();
    header_.replace(patch.offset, patch.bytes.size(), patch.bytes);
  }
  std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                      std::size_t chunk_nbytes) const override {
    auto body = std::make_unique<PackedBody>(header_, payload_nbytes_, *options.stager,
                                             options.compute_crcs, chunk_nbytes, crcs_at_);
    body->follow(options.arriving);
    return body;
  }

 private:
  std::string header_;
  std::vector<std::uint64_t> payload_nbytes_;
  std::unique_ptr<PayloadStaging> payloads_;
  const std::optional<std::uint64_t> crcs_at_;
};

// One rank's file in a distributed checkpoint.
class CheckedPlan final : public FilePlan {
 public:
  // `staging`, which may be null, brings the pieces without data; all other pieces must outlive the
  // plan.  Throws std::invalid_argument for pieces out of order.
  CheckedPlan(std::vector<PlacedPiece> pieces, std::unique_ptr<PayloadStaging> staging)
      : pieces_(std::move(pieces)), staging_(std::move(staging)) {
    for (std::size_t i = 1; i < pieces_.size(); ++i) {
      if (pieces_[i].offset < pieces_[i - 1].end()) {
        throw std::invalid_argument("pieces of a file overlap, or are not in order");
      }
    }
  }

  std::uint64_t nbytes() const override {
    const std::uint64_t nbytes = CheckedBody::nbytes_of(pieces_);
    return nbytes + nbytes / kCheckedBlockNbytes * sizeof(std::uint32_t);
  }
  bool is_pinned() const override { return staging_ != nullptr && staging_->is_pinned(); }
  std::vector<DamagedPayload> damaged() const override { return {}; }
  // The CRCs of the last write's blocks, in order.
  std::span<const std::uint32_t> block_crcs() const { return block_crcs_; }

 protected:
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override {
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

  std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                      std::size_t chunk_nbytes) const override {
    return std::make_unique<CheckedBody>(pieces_, options.stager, chunk_nbytes);
  }

 private:
  std::vector<PlacedPiece> pieces_;
  std::unique_ptr<PayloadStaging> staging_;
  std::vector<std::uint32_t> block_crcs_;
};

}  // namespace ptsave
