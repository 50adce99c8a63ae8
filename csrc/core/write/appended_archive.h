// An archive to which records are appended while nobody knows how many there will be.
//
// It is written to a temporary file.  A batch of records goes out as a whole, in parallel, and the
// next one begins where it ends; only a batch that failed is overwritten by the next.  The central
// directory is kept in memory and comes last, with the records that depend on all others.  So the
// temporary file is at any time a whole number of records, behind which there may be anything.
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

// The records written so far, as the central directory has them.
class WrittenRecords {
 public:
  // `root` is the archive's folder, `alignment` that of payloads.
  WrittenRecords(std::string root, std::uint64_t alignment)
      : root_(std::move(root)), alignment_(alignment) {}

  // Places records behind those written.  Throws as plan() does, but does not know the names of
  // the records before.
  ArchiveLayout place(std::span<const RecordSpec> records) const;
  // All records of a layout, whose CRCs are known.
  void add(const ArchiveLayout& layout, std::span<const std::uint32_t> crcs);
  // A record that was found in a file.
  void add(std::string_view name, std::uint64_t header_offset, std::uint64_t nbytes,
           std::uint32_t crc, std::uint64_t end);

  std::uint64_t end() const { return end_; }
  std::uint64_t size() const { return n_records_; }

  // The rest of the file, from end() on: data.pkl, byteorder, version, the serialization id and the
  // central directory.
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

// One thread at a time, but for nbytes_written().
class AppendedArchive {
 public:
  struct Target {
    std::string path;
    std::string display;  // its name in errors
  };

  // Creates the temporary file.  IoError.
  AppendedArchive(const Target& target, const std::string& root, std::uint64_t alignment);
  AppendedArchive(const AppendedArchive&) = delete;
  AppendedArchive& operator=(const AppendedArchive&) = delete;
  // Removes the temporary file, unless it was published or kept, or belongs to a parent process.
  ~AppendedArchive();

  // Appends a batch; `direct`: past the page cache where the file system allows that.  After an
  // error the archive is as before.  IoError, std::length_error.
  void append(std::span<const RecordSpec> records, const Payloads& payloads, bool direct,
              WriteOptions options, const Poll& poll);
  // Reads bytes of a batch that was written.
  std::string read(std::uint64_t payload_offset, std::uint64_t nbytes) const;
  // Where the payload of a record of the last batch begins.
  std::uint64_t payload_offset(std::size_t record) const { return last_batch_.at(record); }
  void sync();
  // Writes the rest of the file and publishes it.
  void close(std::string_view pickle, bool compute_crcs, bool durable);
  // Lets go of the temporary file: it stays with the records that it has.
  void keep();
  // Removes it.
  void discard();
  // The name of the temporary file in its directory.
  std::string temporary_name() const;

  // The end of the last batch; and of bytes of the current one that are written.
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
