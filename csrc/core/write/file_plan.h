// A file whose layout is known before its first byte is written: an archive, or packed payloads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/io/file.h"
#include "core/write/file_body.h"
#include "core/write/payload_staging.h"
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

}  // namespace ptsave
