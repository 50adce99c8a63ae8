// An archive that grows by batches of records until close().
//
// It is written to a temporary file.  A batch of records is written as a whole, in parallel, and
// the next batch begins at its end; only a failed batch is overwritten.  The central directory
// stays in memory and is written last, with the records that depend on all others.  So the
// temporary file always holds a whole number of records, with arbitrary bytes behind them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/format/archive.h"
#include "core/io/file.h"
#include "core/write/archive_body.h"
#include "core/write/writer.h"

namespace ptsave {

// The central directory of the records written so far.
class WrittenRecords {
 public:
  // `root` is the archive's folder; payloads are aligned to `alignment`.
  WrittenRecords(std::string root, std::uint64_t alignment)
      : root_(std::move(root)), alignment_(alignment) {}

  // Places records behind the written ones.  Throws as plan() does, but misses names of earlier
  // batches.
  ArchiveLayout place(std::span<const RecordSpec> records) const;
  // Adds all records of a layout with their CRCs.
  void add(const ArchiveLayout& layout, std::span<const std::uint32_t> crcs);
  // Adds a record that was found in a file.
  void add(std::string_view name, std::uint64_t header_offset, std::uint64_t nbytes,
           std::uint32_t crc, std::uint64_t end);

  std::uint64_t end() const { return end_; }
  std::uint64_t size() const { return n_records_; }

  // The rest of the file, from end() on: data.pkl, byteorder, version, serialization id, directory.
  std::string closing_bytes(std::string_view pickle, bool compute_crcs) const;

 private:
  void add_entry(std::string_view full_name, std::uint64_t header_offset, std::uint64_t nbytes,
                 std::uint32_t crc);
  void append_record(std::string& out, std::string_view name, std::string_view payload,
                     bool compute_crcs);
  std::string next_serialization_id() const;

  std::string root_;
  std::uint64_t alignment_;
  std::uint64_t end_ = 0;
  std::uint64_t n_records_ = 0;
  std::string directory_;
};

// Not safe for concurrent use, except nbytes_written().
class AppendedArchive {
 public:
  struct Target {
    std::string path;
    std::string display;  // its name in errors
  };

  // Creates the temporary file.  Throws IoError.
  AppendedArchive(const Target& target, const std::string& root, std::uint64_t alignment);
  AppendedArchive(const AppendedArchive&) = delete;
  AppendedArchive& operator=(const AppendedArchive&) = delete;
  // Removes the temporary file, unless it was published or kept, or belongs to a parent process.
  ~AppendedArchive();

  // Appends a batch; `direct` writes it past the page cache if the file system allows that.  Throws
  // IoError and std::length_error, and leaves the archive as it was.
  void append(std::span<const RecordSpec> records, const Payloads& payloads, bool direct,
              WriteOptions options, const Poll& poll);
  // Reads bytes of a written batch.
  std::string read(std::uint64_t payload_offset, std::uint64_t nbytes) const;
  // The payload's offset of a record of the last batch.
  std::uint64_t payload_offset(std::size_t record) const { return last_batch_.at(record); }
  void sync();
  // Writes the rest of the file and publishes it.
  void close(std::string_view pickle, bool compute_crcs, bool durable);
  // Closes the temporary file and keeps it, with its records.
  void keep();
  // Removes the temporary file.
  void discard();
  // The name of the temporary file in its directory.
  std::string temporary_name() const;

  // The end of the last complete batch, and the bytes of the current batch written so far.
  std::uint64_t nbytes() const { return records_.end(); }
  std::uint64_t nbytes_written() const { return progress_.load(std::memory_order_relaxed); }

 private:
  AtomicFile& file() const;
  void write(const ArchiveLayout& layout, const Payloads& payloads, bool direct,
             const WriteOptions& options, const Poll& poll);

  const pid_t process_;
  std::unique_ptr<AtomicFile> file_;
  WrittenRecords records_;
  std::vector<std::uint64_t> last_batch_;
  Progress progress_{0};
  DirectBuffers buffers_;
};

}  // namespace ptsave
