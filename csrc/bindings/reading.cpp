// ptsave._C.Reader.
#include <ATen/core/Tensor.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
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
#include "bindings/gil.h"
#include "core/base/error.h"
#include "core/format/archive.h"
#include "core/io/file.h"
#include "core/read/placement.h"
#include "core/read/reader.h"
#include "pickle/in/unpickler.h"
#include "tensors/archive_storages.h"
#include "tensors/ranges.h"

namespace py = pybind11;

namespace ptsave {

c10::Device unpack_device(const py::handle& device) {
  if (!THPDevice_Check(device.ptr())) throw py::type_error("expected a torch.device");
  return reinterpret_cast<THPDevice*>(device.ptr())->device;
}

namespace {

// A uint8 tensor over a whole storage, as torch's own reader returns storages.
py::object wrap_storage(c10::Storage storage) {
  const auto nbytes = static_cast<std::int64_t>(storage.nbytes());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::Make<std::uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

const at::Tensor& unpack(const py::handle& tensor) {
  if (!THPVariable_Check(tensor.ptr())) throw py::type_error("expected a tensor");
  return THPVariable_Unpack(tensor.ptr());
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
  py::str root() const { return decode(index().root()); }
  bool has_crcs() const { return index().has_crcs(); }
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
    const std::uint64_t offset = without_gil([&] { return reader_->stored_payload_offset(i); });
    // Read into the bytes object: copying several MB would take as long as reading them.
    PyObject* const bytes =
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(record(i).nbytes));
    if (bytes == nullptr) throw py::error_already_set();
    auto payload = py::reinterpret_steal<py::bytes>(bytes);
    without_gil([&] { reader_->read(i, offset, PyBytes_AS_STRING(bytes), verify); });
    return payload;
  }
  py::bytes read_at(std::uint64_t offset, std::uint64_t nbytes) const {
    if (nbytes > this->nbytes()) throw py::value_error("more than the archive holds");
    std::string bytes(nbytes, '\0');
    without_gil([&] { reader_->source().read_at(offset, bytes.data(), bytes.size()); });
    return {bytes};
  }

  // Reads records[k], each once, into the bytes of targets[k]; without targets, only checks.
  std::vector<DamagedRecord> read_records(const std::vector<std::size_t>& records,
                                          const std::vector<py::object>& targets,
                                          std::size_t n_threads, bool verify,
                                          std::size_t max_pinned_nbytes) const {
    for (const std::size_t i : records) checked(i);
    std::vector<at::Tensor> tensors;
    tensors.reserve(targets.size());
    for (const py::object& target : targets) tensors.push_back(unpack_bytes_of(target));
    const Poll poll = make_poll([] { return std::uint64_t{0}; }, py::none());
    return without_gil([&] {
      return ptsave::read_records(*reader_, records, tensors, n_threads, verify, max_pinned_nbytes,
                                  poll);
    });
  }
  void read_ranges(const std::vector<std::pair<std::uint64_t, py::object>>& targets,
                   std::size_t n_threads, std::size_t max_pinned_nbytes) const {
    std::vector<ArchiveRange> ranges;
    ranges.reserve(targets.size());
    for (const auto& [offset, target] : targets) {
      ranges.push_back({offset, unpack_bytes_of(target)});
    }
    const Poll poll = make_poll([] { return std::uint64_t{0}; }, py::none());
    without_gil([&] { ptsave::read_ranges(*reader_, ranges, n_threads, max_pinned_nbytes, poll); });
  }
  // (number, name, payload offset, location) of each record.  The location is the saved one of the
  // storage that the unpickler has taken; None if it has taken none, or if Python made the storage.
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
  void reserve() { storages_.reserve(); }
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
    storages_.plan_copy(unpack(target), unpack(source));
  }
  std::vector<DamagedRecord> fill(const std::vector<std::size_t>& records, std::size_t n_threads,
                                  bool verify, std::size_t max_pinned_nbytes,
                                  const py::object& callback) {
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    return without_gil(
        [&] { return storages_.fill(records, {n_threads, verify, max_pinned_nbytes}, poll); });
  }
  bool is_filled(std::size_t i) const { return storages_.is_filled(checked(i)); }
  std::vector<std::size_t> changed() const { return storages_.changed(); }
  std::vector<std::size_t> referenced() { return storages_.referenced(); }
  std::optional<std::size_t> record_of(const py::handle& tensor) const {
    return storages_.record_of(unpack(tensor));
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
  void release_storages() { storages_.release(); }
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
      .def_static("open_descriptor", &Reader::open_descriptor, py::arg("fd"), py::arg("offset"),
                  py::arg("name"), py::kw_only(), py::arg("direct"))
      .def_static("open_memory", &Reader::open_memory, py::arg("buffer"), py::arg("name"))
      .def("close_file", &Reader::close_file)
      .def("lend_file", &Reader::lend_file, py::arg("fd"), py::arg("offset"), py::kw_only(),
           py::arg("direct"))
      .def_property_readonly("root", &Reader::root)
      .def_property_readonly("has_crcs", &Reader::has_crcs)
      .def_property_readonly("nbytes", &Reader::nbytes)
      .def_property_readonly("descriptor", &Reader::descriptor)
      .def_property_readonly("nbytes_to_read", &Reader::nbytes_to_read)
      .def_property_readonly("all_stored", &Reader::all_stored)
      .def_property_readonly("storages_have_crcs", &Reader::storages_have_crcs)
      .def("record", &Reader::record, py::arg("record"))
      .def("records", &Reader::records)
      .def("other_names", &Reader::other_names)
      .def("find", &Reader::find, py::arg("name"))
      .def("payload_offset", &Reader::payload_offset, py::arg("record"))
      .def("read", &Reader::read, py::arg("record"), py::kw_only(), py::arg("verify"))
      .def("read_records", &Reader::read_records, py::arg("records"), py::arg("targets"),
           py::kw_only(), py::arg("n_threads"), py::arg("verify"), py::arg("max_pinned_nbytes"))
      .def("read_ranges", &Reader::read_ranges, py::arg("ranges"), py::kw_only(),
           py::arg("n_threads"), py::arg("max_pinned_nbytes"))
      .def("places", &Reader::places)
      .def("start", &Reader::start, py::arg("records"), py::kw_only(), py::arg("n_threads"),
           py::arg("verify"), py::arg("exact_offsets"))
      .def("reserve", &Reader::reserve)
      .def("place", &Reader::place, py::arg("location"), py::arg("device"))
      .def("placed_storage", &Reader::placed_storage, py::arg("record"), py::arg("device"))
      .def("plan_copy", &Reader::plan_copy, py::arg("target"), py::arg("source"))
      .def("fill", &Reader::fill, py::arg("records"), py::kw_only(), py::arg("n_threads"),
           py::arg("verify"), py::arg("max_pinned_nbytes"), py::arg("progress"))
      .def("is_filled", &Reader::is_filled, py::arg("record"))
      .def("changed", &Reader::changed)
      .def("referenced", &Reader::referenced)
      .def("record_of", &Reader::record_of, py::arg("tensor"))
      .def("records_of", &Reader::records_of, py::arg("tensors"))
      .def("wait", &Reader::wait, py::arg("record"), py::kw_only(), py::arg("progress"))
      .def("wait_all", &Reader::wait_all, py::kw_only(), py::arg("progress"))
      .def("storage", &Reader::storage, py::arg("record"))
      .def("release_storages", &Reader::release_storages)
      .def("read_at", &Reader::read_at, py::arg("offset"), py::arg("nbytes"))
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
      py::arg("tail"), py::arg("nbytes"), py::arg("name"));
}

}  // namespace ptsave
