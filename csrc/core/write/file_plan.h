// Plans of files whose layout is known before their first byte is written: an archive, packed
// payloads, and pieces with checksums of blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/crc/crc32.h"
#include "core/format/archive.h"
#include "core/io/file.h"
#include "core/pipeline/stager.h"
#include "core/write/archive_body.h"
#include "core/write/payloads.h"
#include "core/write/writer.h"

namespace ptsave {

// Each write produces the whole file, so it may be retried elsewhere.  One write at a time.
class FilePlan {
 public:
  // A file that appears complete or not at all; `display` is its name in errors.
  struct Replacement {
    std::string path;
    std::string display;
    bool durable = false;
  };

  FilePlan() = default;
  FilePlan(const FilePlan&) = delete;
  FilePlan& operator=(const FilePlan&) = delete;
  virtual ~FilePlan() = default;

  virtual std::uint64_t nbytes() const = 0;
  // Whether payloads are left out as holes.
  virtual bool has_holes() const { return false; }
  // Whether payloads are made one at a time, without worker threads.
  virtual bool is_sequential() const { return false; }
  // Whether payloads come from accelerators, through page-locked memory.
  virtual bool is_pinned() const = 0;
  // The payloads with a wrong CRC, if the last write threw FormatError.
  virtual std::vector<DamagedPayload> damaged() const = 0;

  // Replaces or creates a file.  Throws IoError, FormatError.
  void write_file(const Replacement& target, const WriteOptions& options, const Poll& poll);
  // Lets the next write_file() read payloads while they are being copied.
  void follow(ArrivingPayloads& payloads) { arriving_ = &payloads; }
  // Overwrites a file in place, or creates it.  If payloads come from that same file, the bytes go
  // through `scratch`, the descriptor of an empty file.
  void write_in_place(const std::string& path, std::optional<int> scratch, bool durable,
                      const WriteOptions& options, const Poll& poll);
  // Passes the file to `sink` piece by piece, on this thread.
  void write_stream(const StreamSink& sink, const WriteOptions& options);
  // Bytes that the last write has written so far.  Safe for concurrent use.
  std::uint64_t nbytes_written() const { return progress_.load(); }

 protected:
  // Completes the options of a write.  Returns their stager if it lives only for this write.
  virtual std::unique_ptr<Stager> begin_write(WriteOptions& options) = 0;
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
  Progress& progress() { return progress_; }

 private:
  void write_to(File& file, const WriteOptions& options, const Poll& poll);

  Progress progress_{0};
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

// Knows the records' layout and the places of their payloads.
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

// A header and payloads, one directly behind the other, like a safetensors file.
class PackedBody final : public FileBody {
 public:
  // `stager` brings all payloads, of these sizes.  Header, sizes and stager must outlive the body.
  PackedBody(const std::string& header, std::span<const std::uint64_t> payload_nbytes,
             Stager& stager, bool compute_crcs, std::size_t chunk_nbytes);

  void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) override;
  std::string tail() override;
  std::span<const std::uint32_t> crcs() override { return crcs_; }
  // Reads all payloads, which must be in host memory, through `arriving`.
  void follow(ArrivingPayloads* arriving) { arriving_ = arriving; }

 private:
  // The CRC of a payload's part in a chunk.
  struct PieceCrc {
    std::size_t payload;
    std::uint64_t nbytes;
    std::uint32_t crc;
  };

  std::vector<PayloadPiece> pieces_of(std::size_t chunk) const;

  const std::string& header_;
  Stager& stager_;
  ArrivingPayloads* arriving_ = nullptr;
  const bool compute_crcs_;
  std::vector<std::uint64_t> ends_;            // of the payloads, in the file
  std::vector<std::vector<PieceCrc>> pieces_;  // by chunk
  std::vector<std::uint32_t> crcs_;
};

class PackedPlan final : public FilePlan {
 public:
  // `payloads` brings all payloads, of these sizes.
  PackedPlan(std::string header, std::vector<std::uint64_t> payload_nbytes,
             std::unique_ptr<PayloadStaging> payloads);

  std::uint64_t nbytes() const override;
  bool is_pinned() const override { return payloads_->is_pinned(); }
  std::vector<DamagedPayload> damaged() const override { return payloads_->damaged(); }

 protected:
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                      std::size_t chunk_nbytes) const override;

 private:
  std::string header_;
  std::vector<std::uint64_t> payload_nbytes_;
  std::unique_ptr<PayloadStaging> payloads_;
};

// Bytes at a position in the file; without `data`, the stager brings them by the piece's number.
struct PlacedPiece {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  const std::byte* data = nullptr;

  std::uint64_t end() const { return offset + nbytes; }
};

// The blocks of a file, with zeros between its pieces.  The tail is the table of the blocks'
// checksums, so that any part can be read and checked alone.
class CheckedBody final : public FileBody {
 public:
  // Pieces are in the order of their offsets, without overlaps; chunks are whole blocks.  Pieces
  // and stager, which may be null, must outlive the body.
  CheckedBody(std::span<const PlacedPiece> pieces, Stager* stager, std::size_t chunk_nbytes);

  // Size of the blocks that hold all pieces.
  static std::uint64_t nbytes_of(std::span<const PlacedPiece> pieces);

  void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) override;
  std::string tail() override;
  // The CRCs of the blocks.
  std::span<const std::uint32_t> crcs() override { return crcs_; }

 private:
  std::vector<std::size_t> pieces_of(ByteRange range) const;

  const std::span<const PlacedPiece> pieces_;
  Stager* const stager_;
  std::vector<std::uint32_t> crcs_;
};

// One rank's file in a distributed checkpoint.
class CheckedPlan final : public FilePlan {
 public:
  // `staging`, which may be null, brings the pieces without data; all other pieces must outlive the
  // plan.  Throws std::invalid_argument for pieces out of order.
  CheckedPlan(std::vector<PlacedPiece> pieces, std::unique_ptr<PayloadStaging> staging);

  std::uint64_t nbytes() const override;
  bool is_pinned() const override { return staging_ != nullptr && staging_->is_pinned(); }
  std::vector<DamagedPayload> damaged() const override { return {}; }
  // The CRCs of the last write's blocks, in order.
  std::span<const std::uint32_t> block_crcs() const { return block_crcs_; }

 protected:
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                      std::size_t chunk_nbytes) const override;

 private:
  std::vector<PlacedPiece> pieces_;
  std::unique_ptr<PayloadStaging> staging_;
  std::vector<std::uint32_t> block_crcs_;
};

}  // namespace ptsave
