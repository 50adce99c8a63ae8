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

// Each write produces the file anew, so one that failed may be tried again elsewhere.  One write at
// a time.
class FilePlan {
 public:
  // A file that appears whole or not at all; `display` is its name in errors.
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
  // Whether payloads are left out.
  virtual bool has_holes() const { return false; }
  // Whether payloads are made one at a time; then no threads help.
  virtual bool is_sequential() const { return false; }
  // Whether payloads come through page-locked memory: from accelerators.
  virtual bool is_pinned() const = 0;
  // The payloads of the last write that did not have the CRC expected of them: it has thrown
  // FormatError.
  virtual std::vector<DamagedPayload> damaged() const = 0;

  // Replaces a file, or creates it.  IoError, FormatError.
  void write_file(const Replacement& target, const WriteOptions& options, const Poll& poll);
  // Lets the next write, of a file that appears whole, read payloads while they are copied.
  void follow(ArrivingPayloads& payloads) { arriving_ = &payloads; }
  // Overwrites a file where it is, or creates it; by way of the empty file `scratch`, a descriptor,
  // if payloads are read from that very file.
  void write_in_place(const std::string& path, std::optional<int> scratch, bool durable,
                      const WriteOptions& options, const Poll& poll);
  // Hands the file on piece by piece, on this thread.
  void write_stream(const StreamSink& sink, const WriteOptions& options);
  // Bytes of the file that the last write has written so far.  Safe for concurrent use.
  std::uint64_t nbytes_written() const { return progress_.load(); }

 protected:
  // Completes the options of a write.  Returns the stager in them, if it lives only so long.
  virtual std::unique_ptr<Stager> begin_write(WriteOptions& options) = 0;
  // The file's body in chunks of a size; `options` are those of the write.
  virtual std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                              std::size_t chunk_nbytes) const = 0;

  // Lets go of what the write of a file that appears whole has left.
  void release_arriving() {
    arriving_ = nullptr;
    complete_.reset();
  }

  // Calls write(options), options being those of this write.
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
  // A file of arriving payloads, of which there is no second copy, that could not be renamed.
  std::optional<File> complete_;
};

}  // namespace ptsave
