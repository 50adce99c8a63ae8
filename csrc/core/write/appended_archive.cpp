#include "core/write/appended_archive.h"

#include <unistd.h>

#include <bit>
#include <stdexcept>
#include <utility>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/format/zip.h"
#include "core/memory/buffer.h"

namespace ptsave {
namespace {

constexpr std::string_view kIdName = ".data/serialization_id";
constexpr std::string_view kVersion = "3\n";
constexpr std::string_view kByteOrder =
    std::endian::native == std::endian::little ? "little" : "big";

std::byte* bytes_of(std::string& text, std::size_t offset) {
  return reinterpret_cast<std::byte*>(text.data()) + offset;
}

}  // namespace

// -----------------------------------------------------------------------------------
// WrittenRecords

ArchiveLayout WrittenRecords::place(std::span<const RecordSpec> records) const {
  return plan_part(root_, records, alignment_, end_);
}

void WrittenRecords::add(const ArchiveLayout& layout, std::span<const std::uint32_t> crcs) {
  const std::string prefix = root_ + "/";
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const RecordLayout& record = layout.record(i);
    add_entry(prefix + std::string(layout.name(i)), record.header_offset, record.nbytes, crcs[i]);
  }
  end_ = layout.central_directory_offset();
}

void WrittenRecords::add(std::string_view name, std::uint64_t header_offset, std::uint64_t nbytes,
                         std::uint32_t crc, std::uint64_t end) {
  add_entry(root_ + "/" + std::string(name), header_offset, nbytes, crc);
  end_ = end;
}

void WrittenRecords::add_entry(std::string_view full_name, std::uint64_t header_offset,
                               std::uint64_t nbytes, std::uint32_t crc) {
  const zip::Entry entry{full_name, nbytes, header_offset};
  const std::size_t at = directory_.size();
  if (at + zip::central_header_nbytes(entry) + zip::kMaxZip64ExtraNbytes >= zip::kMax32) {
    throw std::length_error("central directory too large at record " + std::string(full_name));
  }
  directory_.resize(at + zip::central_header_nbytes(entry));
  zip::write_central_header(entry, crc, bytes_of(directory_, at));
  ++n_records_;
}

std::string WrittenRecords::closing_bytes(std::string_view pickle, bool compute_crcs) const {
  WrittenRecords all(*this);
  std::string out;
  all.append_record(out, "data.pkl", pickle, compute_crcs);
  all.append_record(out, "byteorder", kByteOrder, compute_crcs);
  all.append_record(out, "version", kVersion, compute_crcs);
  all.append_record(out, kIdName, all.next_serialization_id(), compute_crcs);
  out += all.directory_;
  const std::size_t at = out.size();
  out.resize(at + zip::kEndRecordsNbytes);
  zip::write_end_records({all.end_, all.directory_.size(), all.n_records_}, bytes_of(out, at));
  return out;
}

void WrittenRecords::append_record(std::string& out, std::string_view name,
                                   std::string_view payload, bool compute_crcs) {
  const RecordSpec spec{std::string(name), payload.size()};
  const ArchiveLayout layout = place({&spec, 1});
  const RecordLayout& record = layout.record(0);
  const std::uint32_t crc = compute_crcs ? crc32(0, payload.data(), payload.size()) : 0;
  const std::size_t at = out.size();
  out.resize(at + (record.end() - record.header_offset));
  layout.local_header(0, bytes_of(out, at));
  payload.copy(out.data() + at + (record.payload_offset - record.header_offset), payload.size());
  layout.data_descriptor(0, crc, bytes_of(out, at + (record.payload_end() - record.header_offset)));
  add(layout, {&crc, 1});
}

std::string WrittenRecords::next_serialization_id() const {
  std::vector<std::string_view> names;
  std::vector<std::uint32_t> crcs;
  std::span<const std::byte> rest(reinterpret_cast<const std::byte*>(directory_.data()),
                                  directory_.size());
  while (!rest.empty()) {
    zip::CentralHeader header;
    if (zip::parse_central_header(rest, header) != nullptr) throw std::logic_error("own directory");
    names.push_back(header.name.substr(root_.size() + 1));
    if (header.nbytes > 0) crcs.push_back(header.crc);
    rest = rest.subspan(header.header_nbytes);
  }
  return serialization_id(hash_names(names), crcs);
}

// ----------------------------------------------------------------------------------
// AppendedArchive

AppendedArchive::AppendedArchive(const Target& target, const std::string& root,
                                 std::uint64_t alignment)
    : process_(::getpid()),
      file_(
          std::make_unique<AtomicFile>(target.path, target.display, AtomicFile::Leftovers::kKeep)),
      records_(root, alignment) {}

AppendedArchive::~AppendedArchive() {
  if (::getpid() != process_) keep();
}

AtomicFile& AppendedArchive::file() const {
  if (file_ == nullptr) throw std::invalid_argument("the archive is closed");
  return *file_;
}

void AppendedArchive::append(std::span<const RecordSpec> records, const Payloads& payloads,
                             bool direct, WriteOptions options, const Poll& poll) {
  const ArchiveLayout layout = records_.place(records);
  file();
  options.buffers = &buffers_;
  write(layout, payloads, direct, options, poll);
  last_batch_.clear();
  for (std::size_t i = 0; i < layout.size(); ++i) {
    last_batch_.push_back(layout.record(i).payload_offset);
  }
}

void AppendedArchive::write(const ArchiveLayout& layout, const Payloads& payloads, bool direct,
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

std::string AppendedArchive::read(std::uint64_t payload_offset, std::uint64_t nbytes) const {
  std::string payload(nbytes, '\0');
  file().file().read_at(payload_offset, payload.data(), payload.size());
  return payload;
}

void AppendedArchive::sync() { file().file().sync(); }

void AppendedArchive::close(std::string_view pickle, bool compute_crcs, bool durable) {
  const std::string rest = records_.closing_bytes(pickle, compute_crcs);
  File& out = file().file();
  out.write_at(records_.end(), rest.data(), rest.size());
  out.truncate(records_.end() + rest.size());  // a failed batch may have left more
  file().commit(durable);
  discard();
}

void AppendedArchive::discard() {
  buffers_.release();
  file_.reset();
}

void AppendedArchive::keep() {
  if (file_ == nullptr) return;
  file_->keep();
  discard();
}

std::string AppendedArchive::temporary_name() const {
  return file_ == nullptr ? std::string() : file_->temporary_name();
}

}  // namespace ptsave
