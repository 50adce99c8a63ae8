// ptsave._C.Reader.
#include <ATen/core/Tensor.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/base/error.h"
#include "core/format/archive.h"
#include "core/io/file.h"
#include "core/read/reader.h"
#include "pickle/in/unpickler.h"
#include "tensors/archive_storages.h"
#include "tensors/ranges.h"

namespace ptsave {
namespace {

// A uint8 tensor over a whole storage, as torch's own reader returns storages.
py::object wrap_storage(c10::Storage storage) {
  const auto nbytes = static_cast<std::int64_t>(storage.nbytes());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::Make<std::uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return wrap_tensor(std::move(tensor));
}

// An archive and its storages, as Python objects.  Keeps the memory that it reads from alive.
class Reader final : public StorageSource {
 public:
  Reader(ByteSource source, py::object keep)
      : keep_(std::move(keep)),
        reader_(without_gil([&] { return std::make_unique<ArchiveReader>(std::move(source)); })),
        storages_(*reader_, [this](std::size_t i) { wait(i, py::none()); }) {}

  static std::unique_ptr<Reader> open_descriptor(int fd, std::uint64_t offset,
                                                 const std::string& name, bool direct) {
    return std::make_unique<Reader>(
        ByteSource(File::reopen_for_reading(fd, name), offset, direct_reads(direct)), py::none());
  }
  static std::unique_ptr<Reader> open_memory(const py::buffer& buffer, const std::string& name) {
    const py::buffer_info info = buffer.request();
    const auto nbytes = static_cast<std::uint64_t>(info.size * info.itemsize);
    // Hold the export by a separate memoryview, because the caller may release its own.
    auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(buffer.ptr()));
    if (!view) throw py::error_already_set();
    return std::make_unique<Reader>(
        ByteSource(static_cast<const std::byte*>(info.ptr), nbytes, name), std::move(view));
  }

  // Must not be called during a read.
  void close_file() {
    const ByteSource& source = reader_->source();
    reader_->exchange(ByteSource::closed(source.nbytes(), source.name()));
  }
  void lend_file(int fd, std::uint64_t offset, bool direct) {
    without_gil([&] {
      File file = File::reopen_for_reading(fd, reader_->source().name());
      reader_->exchange(ByteSource(std::move(file), offset, direct_reads(direct)));
    });
  }

  const ArchiveIndex& index() const { return reader_->index(); }
  ArchiveStorages& storages() { return storages_; }
  py::str root() const { return decode(index().root()); }
  bool all_stored() const { return index().all_stored(); }
  bool storages_have_crcs() const { return storages_.records().have_crcs(); }
  std::uint64_t nbytes() const { return reader_->source().nbytes(); }
  int descriptor() const { return reader_->source().descriptor(); }
  std::uint64_t nbytes_to_read() const { return reader_->nbytes_to_read(); }

  const IndexedRecord& record(std::size_t i) const { return index().records()[checked(i)]; }
  std::vector<IndexedRecord> records() const {
    return {index().records().begin(), index().records().end()};
  }
  std::vector<py::str> other_names() const {
    std::vector<py::str> names;
    names.reserve(storages_.records().others().size());
    for (const std::size_t i : storages_.records().others())
      names.push_back(decode(record(i).name));
    return names;
  }
  std::optional<std::size_t> find(const py::str& name) const {
    const std::size_t i = index().find(encode(name));
    return i == ArchiveIndex::kNotFound ? std::nullopt : std::optional(i);
  }
  std::uint64_t payload_offset(std::size_t i) const {
    checked(i);
    return without_gil([&] { return reader_->payload_offset(i); });
  }
  py::bytes read(std::size_t i, bool verify) const {
    checked(i);
    return read_record(*reader_, i, verify);
  }
  py::bytes read_at(std::uint64_t offset, std::uint64_t nbytes) const {
    if (nbytes > this->nbytes()) throw py::value_error("more bytes than the archive has");
    std::string bytes(nbytes, '\0');
    without_gil([&] { reader_->source().read_at(offset, bytes.data(), bytes.size()); });
    return {bytes};
  }

  // Reads records[k], each once, into the bytes of targets[k]; without targets, only checks the
  // records.
  std::vector<DamagedRecord> read_records(const std::vector<std::size_t>& records,
                                          const std::vector<py::object>& targets,
                                          std::size_t n_threads, bool verify,
                                          std::size_t max_pinned_nbytes,
                                          const py::object& callback) const {
    for (const std::size_t i : records) checked(i);
    std::vector<at::Tensor> tensors;
    tensors.reserve(targets.size());
    for (const py::object& target : targets) tensors.push_back(unpack_bytes_of(target));
    const Poll poll = make_poll({}, callback);
    return without_gil([&] {
      return ptsave::read_records(*reader_, records, tensors, n_threads, verify, max_pinned_nbytes,
                                  poll);
    });
  }
  void read_ranges(const std::vector<std::pair<std::uint64_t, py::object>>& targets,
                   std::size_t n_threads, std::size_t max_pinned_nbytes) const {
    std::vector<TensorRange> ranges;
    ranges.reserve(targets.size());
    for (const auto& [offset, target] : targets) {
      ranges.push_back({0, offset, unpack_bytes_of(target)});
    }
    const Poll poll = make_poll();
    without_gil([&] { ptsave::read_ranges(*reader_, ranges, n_threads, max_pinned_nbytes, poll); });
  }
  // (number, name, payload offset, location) of each record.  The location is the one saved for the
  // record's storage, or None if the unpickler has not taken the storage or Python made it.
  py::list places() const {
    py::list result(index().records().size());
    std::unordered_map<const std::string*, py::object> locations{{nullptr, py::none()}};
    for (std::size_t i = 0; i < result.size(); ++i) {
      const std::string* const location = storages_.location_of(i);
      py::object& text = locations[location];
      if (!text) text = py::str(*location);
      result[i] = py::make_tuple(i, decode(record(i).name), record(i).payload_offset, text);
    }
    return result;
  }

  void start(const std::optional<std::vector<std::size_t>>& records, std::size_t n_threads,
             bool verify, bool exact_offsets) {
    const std::vector<std::size_t>& wanted = records ? *records : storages_.records().storages();
    for (const std::size_t i : wanted) checked(i);
    without_gil([&] { storages_.start(wanted, n_threads, verify, exact_offsets); });
  }
  void place(const std::string& location, const py::handle& device) {
    storages_.place(location, unpack_device(device));
  }
  const c10::Storage* storage_of(std::string_view key, std::uint64_t nbytes,
                                 std::string_view location) override {
    return storages_.storage_of(key, nbytes, location);
  }
  py::object storage(std::size_t i) { return wrap_storage(storages_.storage(checked(i))); }
  py::object placed_storage(std::size_t i, const py::handle& device) {
    return py::reinterpret_steal<py::object>(
        THPStorage_Wrap(storages_.storage_on(checked(i), unpack_device(device))));
  }
  void plan_copy(const py::handle& target, const py::handle& source) {
    storages_.plan_copy(unpack_tensor(target), unpack_tensor(source));
  }
  std::vector<DamagedRecord> fill(const std::vector<std::size_t>& records, std::size_t n_threads,
                                  bool verify, std::size_t max_pinned_nbytes,
                                  const py::object& callback) {
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    return without_gil(
        [&] { return storages_.fill(records, {n_threads, verify, max_pinned_nbytes}, poll); });
  }
  bool is_filled(std::size_t i) { return storages_.is_filled(checked(i)); }
  std::optional<std::size_t> record_of(const py::handle& tensor) const {
    return storages_.record_of(unpack_tensor(tensor));
  }
  std::vector<std::optional<std::size_t>> records_of(const py::list& tensors) const {
    std::vector<std::optional<std::size_t>> records;
    records.reserve(tensors.size());
    for (const py::handle tensor : tensors) records.push_back(record_of(tensor));
    return records;
  }
  void wait(std::size_t i, const py::object& callback) {
    checked(i);
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    without_gil([&] { reader_->wait(i, poll); });
  }
  std::vector<DamagedRecord> wait_all(const py::object& callback) {
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    return without_gil([&] { return reader_->wait_all(poll); });
  }
  void cancel() {
    without_gil([&] { reader_->cancel(); });
  }

 private:
  std::size_t checked(std::size_t i) const {
    if (i >= index().records().size()) throw py::index_error("no such record");
    return i;
  }

  py::object keep_;  // outlives reader_
  std::unique_ptr<ArchiveReader> reader_;
  ArchiveStorages storages_;
};

}  // namespace

void bind_reading(py::module_& module) {
  py::class_<IndexedRecord>(module, "Record")
      .def_property_readonly("name", [](const IndexedRecord& self) { return decode(self.name); })
      .def_readonly("nbytes", &IndexedRecord::nbytes)
      .def_readonly("crc", &IndexedRecord::crc)
      .def_readonly("header_offset", &IndexedRecord::header_offset)
      .def_readonly("payload_offset", &IndexedRecord::payload_offset)
      .def_readonly("limit", &IndexedRecord::limit)
      .def_readonly("stored_nbytes", &IndexedRecord::stored_nbytes)
      .def_readonly("method", &IndexedRecord::method)
      .def_readonly("directory", &IndexedRecord::directory)
      .def_property_readonly("stored", &IndexedRecord::stored)
      .def_property_readonly("encrypted", &IndexedRecord::encrypted);
  py::class_<DamagedRecord>(module, "DamagedRecord")
      .def_property_readonly("name", [](const DamagedRecord& self) { return decode(self.name); })
      .def_readonly("payload_offset", &DamagedRecord::payload_offset)
      .def_readonly("expected_crc", &DamagedRecord::expected_crc)
      .def_readonly("actual_crc", &DamagedRecord::actual_crc);
  const py::class_<StorageSource> storage_source(module, "StorageSource");
  py::class_<Reader, StorageSource>(module, "Reader")
      .def_static("open_descriptor", &Reader::open_descriptor, "fd"_a, "offset"_a, "name"_a,
                  py::kw_only(), "direct"_a)
      .def_static("open_memory", &Reader::open_memory, "buffer"_a, "name"_a)
      .def("close_file", &Reader::close_file)
      .def("lend_file", &Reader::lend_file, "fd"_a, "offset"_a, py::kw_only(), "direct"_a)
      .def_property_readonly("root", &Reader::root)
      .def_property_readonly("has_crcs", [](const Reader& self) { return self.index().has_crcs(); })
      .def_property_readonly("nbytes", &Reader::nbytes)
      .def_property_readonly("descriptor", &Reader::descriptor)
      .def_property_readonly("nbytes_to_read", &Reader::nbytes_to_read)
      .def_property_readonly("all_stored", &Reader::all_stored)
      .def_property_readonly("storages_have_crcs", &Reader::storages_have_crcs)
      .def("record", &Reader::record, "record"_a)
      .def("records", &Reader::records)
      .def("other_names", &Reader::other_names)
      .def("find", &Reader::find, "name"_a)
      .def("payload_offset", &Reader::payload_offset, "record"_a)
      .def("read", &Reader::read, "record"_a, py::kw_only(), "verify"_a)
      .def("read_records", &Reader::read_records, "records"_a, "targets"_a, py::kw_only(),
           "n_threads"_a, "verify"_a, "max_pinned_nbytes"_a, "progress"_a = py::none())
      .def("read_ranges", &Reader::read_ranges, "ranges"_a, py::kw_only(), "n_threads"_a,
           "max_pinned_nbytes"_a)
      .def("places", &Reader::places)
      .def("start", &Reader::start, "records"_a, py::kw_only(), "n_threads"_a, "verify"_a,
           "exact_offsets"_a)
      .def("reserve", [](Reader& self) { self.storages().reserve(); })
      .def("place", &Reader::place, "location"_a, "device"_a)
      .def("placed_storage", &Reader::placed_storage, "record"_a, "device"_a)
      .def("plan_copy", &Reader::plan_copy, "target"_a, "source"_a)
      .def("fill", &Reader::fill, "records"_a, py::kw_only(), "n_threads"_a, "verify"_a,
           "max_pinned_nbytes"_a, "progress"_a)
      .def("is_filled", &Reader::is_filled, "record"_a)
      .def("changed", [](Reader& self) { return self.storages().changed(); })
      .def("referenced", [](Reader& self) { return self.storages().referenced(); })
      .def("record_of", &Reader::record_of, "tensor"_a)
      .def("records_of", &Reader::records_of, "tensors"_a)
      .def("wait", &Reader::wait, "record"_a, py::kw_only(), "progress"_a)
      .def("wait_all", &Reader::wait_all, py::kw_only(), "progress"_a)
      .def("storage", &Reader::storage, "record"_a)
      .def("release_storages", [](Reader& self) { self.storages().release(); })
      .def("read_at", &Reader::read_at, "offset"_a, "nbytes"_a)
      .def("cancel", &Reader::cancel);
  module.attr("MAX_TAIL_NBYTES") = kMaxTailNbytes;
  module.def(
      "find_central_directory",
      [](const py::bytes& tail, std::uint64_t nbytes, const std::string& name) {
        const auto bytes = static_cast<std::string_view>(tail);
        const CentralDirectory where = naming_file(
            name, [&] { return find_central_directory(std::as_bytes(std::span(bytes)), nbytes); });
        return std::pair(where.offset, where.nbytes);
      },
      "tail"_a, "nbytes"_a, "name"_a);
}

}  // namespace ptsave
