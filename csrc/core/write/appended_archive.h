// An archive that grows by batches of records until close().
//
// It is written to a temporary file.  A batch of records is written as a whole, in parallel, and
// the next batch begins at its end; only a failed batch is overwritten.  The central directory
// stays in memory and is written last, with the records that depend on all others.  So the
// temporary file always holds complete records, with arbitrary bytes behind the last one.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/format/archive.h"
#include "core/format/zip.h"
#include "core/io/file.h"
#include "core/memory/buffer.h"
#include "core/write/file_body.h"
#include "core/write/writer.h"

namespace ptsave {

inline std::byte* bytes_at(std::string& text, std::size_t offset) {
  return reinterpret_cast<std::byte*>(text.data()) + offset;
}

// The central directory of the records written so far.
class WrittenRecords {
 public:
  // `root` is the archive's folder; payloads are aligned to `alignment`.
  WrittenRecords(std::string root, std::uint64_t alignment)
      : root_(std::move(root)), alignment_(alignment) {}

  // Places records behind the written ones.  Throws as plan() does, but does not notice a name that
  // an earlier batch has used.
  ArchiveLayout place(std::span<const RecordSpec> records) const {
    return plan_part(root_, records, alignment_, end_);
  }
  // Adds all records of a layout with their CRCs.
  void add(const ArchiveLayout& layout, std::span<const std::uint32_t> crcs) {
    const std::string prefix = root_ + "/";
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const RecordLayout& record = layout.record(i);
      add_entry(prefix + std::string(layout.name(i)), record.header_offset, record.nbytes, crcs[i]);
    }
    end_ = layout.central_directory_offset();
  }
  // Adds a record that was found in a file.
  void add(std::string_view name, std::uint64_t header_offset, std::uint64_t nbytes,
           std::uint32_t crc, std::uint64_t end) {
    add_entry(root_ + "/" + std::string(name), header_offset, nbytes, crc);
    end_ = end;
  }

  std::uint64_t end() const { return end_; }
  std::uint64_t size() const { return n_records_; }

  // The rest of the file, from end() on: data.pkl, byteorder, version, serialization id, directory.
  std::string closing_bytes(std::string_view pickle, bool compute_crcs) const {
    WrittenRecords all(*this);
    std::string out;
    all.append_record(out, "data.pkl", pickle, compute_crcs);
    all.append_record(out, "byteorder",
                      std::endian::native == std::endian::little ? "little" : "big", compute_crcs);
    all.append_record(out, "version", "3\n", compute_crcs);
    all.append_record(out, ".data/serialization_id", all.next_serialization_id(), compute_crcs);
    out += all.directory_;
    const std::size_t at = out.size();
    out.resize(at + zip::kEndRecordsNbytes);
    zip::write_end_records({all.end_, all.directory_.size(), all.n_records_}, bytes_at(out, at));
    return out;
  }

 private:
  void add_entry(std::string_view full_name, std::uint64_t header_offset, std::uint64_t nbytes,
                 std::uint32_t crc) {
    const zip::Entry entry{full_name, nbytes, header_offset};
    const std::size_t at = directory_.size();
    if (at + zip::central_header_nbytes(entry) + zip::kMaxZip64ExtraNbytes >= zip::kMax32) {
      throw std::length_error("central directory too large at record " + std::string(full_name));
    }
    directory_.resize(at + zip::central_header_nbytes(entry));
    zip::write_central_header(entry, crc, bytes_at(directory_, at));
    ++n_records_;
  }

  void append_record(std::string& out, std::string_view name, std::string_view payload,
                     bool compute_crcs) {
    const RecordSpec spec{std::string(name), payload.size()};
    const ArchiveLayout layout = place({&spec, 1});
    const RecordLayout& record = layout.record(0);
    const std::uint32_t crc = compute_crcs ? crc32(0, payload.data(), payload.size()) : 0;
    const std::size_t at = out.size();
    out.resize(at + (record.end() - record.header_offset));
    layout.local_header(0, bytes_at(out, at));
    payload.copy(out.data() + at + (record.payload_offset - record.header_offset), payload.size());
    layout.data_descriptor(0, crc,
                           bytes_at(out, at + (record.payload_end() - record.header_offset)));
    add(layout, {&crc, 1});
  }

  std::string next_serialization_id() const {
    std::vector<std::string_view> names;
    std::vector<std::uint32_t> crcs;
    std::span<const std::byte> rest(reinterpret_cast<const std::byte*>(directory_.data()),
                                    directory_.size());
    while (!rest.empty()) {
      zip::CentralHeader header;
      if (zip::parse_central_header(rest, header) != nullptr)
        throw std::logic_error("own directory");
      names.push_back(header.name.substr(root_.size() + 1));
      if (header.nbytes > 0) crcs.push_back(header.crc);
      rest = rest.subspan(header.header_nbytes);
    }
    return serialization_id(hash_names(names), crcs);
  }

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
  AppendedArchive(const Target& target, const std::string& root, std::uint64_t alignment)
      : process_(::getpid()),
        file_(std::make_unique<AtomicFile>(target.path, target.display,
                                           AtomicFile::Leftovers::kKeep)),
        records_(root, alignment) {}
  // Removes the temporary file, unless it was published or kept, or belongs to a parent process.
  ~AppendedArchive() {
    if (::getpid() != process_) keep();
  }

  // Appends a batch; `direct` writes it past the page cache if the file system allows that.  Throws
  // IoError and std::length_error; the archive is then as it was before.
  void append(std::span<const RecordSpec> records, const Payloads& payloads, bool direct,
              WriteOptions options, const Poll& poll) {
    const ArchiveLayout layout = records_.place(records);
    file();
    options.buffers = &buffers_;
    write(layout, payloads, direct, options, poll);
    last_batch_.clear();
    for (std::size_t i = 0; i < layout.size(); ++i) {
      last_batch_.push_back(layout.record(i).payload_offset);
    }
  }

  // Reads bytes of a written batch.
  std::string read(std::uint64_t payload_offset, std::uint64_t nbytes) const {
    std::string payload(nbytes, '\0');
    file().file().read_at(payload_offset, payload.data(), payload.size());
    return payload;
  }
  // The payload offset of a record of the last batch.
  std::uint64_t payload_offset(std::size_t record) const { return last_batch_.at(record); }
  void sync() { file().file().sync(); }
  // Writes the rest of the file and publishes it.
  void close(std::string_view pickle, bool compute_crcs, bool durable) {
    const std::string rest = records_.closing_bytes(pickle, compute_crcs);
    File& out = file().file();
    out.write_at(records_.end(), rest.data(), rest.size());
    out.truncate(records_.end() + rest.size());  // a failed batch may have left more
    file().commit(durable);
    discard();
  }
  // Closes the temporary file and keeps it, with its records.
  void keep() {
    if (file_ == nullptr) return;
    file_->keep();
    discard();
  }
  // Removes the temporary file.
  void discard() {
    buffers_.release();
    file_.reset();
  }
  // The name of the temporary file in its directory.
  std::string temporary_name() const {
    return file_ == nullptr ? std::string() : file_->temporary_name();
  }

  // The end of the last complete batch, and the number of bytes of the current batch written so
  // far.
  std::uint64_t nbytes() const { return records_.end(); }
  std::uint64_t nbytes_written() const { return progress_.load(std::memory_order_relaxed); }

 private:
  AtomicFile& file() const {
    if (file_ == nullptr) throw std::invalid_argument("the archive is closed");
    return *file_;
  }
  void write(const ArchiveLayout& layout, const Payloads& payloads, bool direct,
             const WriteOptions& options, const Poll& poll) {
    File& out = file().file();
    direct = direct && out.direct_io_alignment().supported();
    const std::uint64_t begin = records_.end();
    const std::uint64_t origin =
        direct ? align_down(begin, out.direct_io_alignment().block_nbytes()) : begin;
    // Direct writes that extend a file wait for each other.
    if (direct) out.preallocate(layout.central_directory_offset());
    std::string front(begin - origin, '\0');
    out.read_at(origin, front.data(), front.size());
    progress_ = 0;
    RecordsBody body(layout, {origin, layout.central_directory_offset(), layout.size()},
                     std::move(front), payloads, options.stager, options.compute_crcs,
                     direct ? direct_chunk_nbytes(out, options) : options.chunk_nbytes);
    try {
      if (direct) {
        write_direct(body, out, origin, options, progress_, poll);
      } else {
        write_to_file(body, out, origin, options, progress_, poll);
      }
    } catch (...) {
      // Remove the failed batch, which may have filled the disk.  The first error counts.
      static_cast<void>(::ftruncate(out.fd(), static_cast<off_t>(begin)));
      throw;
    }
    records_.add(layout, body.crcs());
  }

  const pid_t process_;
  std::unique_ptr<AtomicFile> file_;
  WrittenRecords records_;
  std::vector<std::uint64_t> last_batch_;
  Progress progress_{0};
  DirectBuffers buffers_;
};

}  // namespace ptsave
