// ptsave._C.Reader.
#include <ATen/core/Tensor.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "core/archive.h"
#include "core/file.h"
#include "core/reader.h"
#include "pickle/unpickler.h"
#include "storage/restore.h"
#include "storage/storage.h"

namespace py = pybind11;

namespace ptsave {

c10::Device unpack_device(const py::handle& device) {
  if (!THPDevice_Check(device.ptr())) throw py::type_error("expected a torch.device");
  return reinterpret_cast<THPDevice*>(device.ptr())->device;
}

namespace {

// A uint8 tensor over a whole storage: the form in which torch's own reader hands storages out.
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

// The device for storages that were saved at a location.
struct Place {
  std::string location;
  c10::Device device;
};

class Reader final : public StorageSource {
 public:
  Reader(ArchiveSource source, py::object keep)
      : keep_(std::move(keep)),
        reader_(without_gil([&] { return std::make_unique<ArchiveReader>(std::move(source)); })) {
    for (std::size_t i = 0; i < index().records().size(); ++i) {
      const bool in_data = index().records()[i].name.starts_with(kDataFolder);
      (in_data ? data_records_ : other_records_).push_back(i);
    }
  }

  static std::unique_ptr<Reader> open_descriptor(int fd, std::uint64_t offset,
                                                 const std::string& name, bool direct) {
    return std::make_unique<Reader>(
        ArchiveSource(File::reopen_for_reading(fd, name), offset, direct_reads(direct)),
        py::none());
  }
  static std::unique_ptr<Reader> open_memory(const py::buffer& buffer, const std::string& name) {
    const py::buffer_info info = buffer.request();
    const auto nbytes = static_cast<std::uint64_t>(info.size * info.itemsize);
    // A memoryview holds the export, so that the buffer's owner cannot resize it meanwhile.
    return std::make_unique<Reader>(
        ArchiveSource(static_cast<const std::byte*>(info.ptr), nbytes, name),
        py::memoryview(buffer));
  }

  py::str root() const { return decode(reader_->index().root()); }
  bool has_crcs() const { return reader_->index().has_crcs(); }
  std::uint64_t nbytes() const { return reader_->source().nbytes(); }
  int descriptor() const { return reader_->source().descriptor(); }

  const IndexedRecord& record(std::size_t i) const {
    check(i);
    return index().records()[i];
  }
  std::vector<IndexedRecord> records() const {
    return {index().records().begin(), index().records().end()};
  }
  bool all_stored() const { return std::ranges::all_of(index().records(), &IndexedRecord::stored); }
  // torch writes a zero for the CRC of every storage, or of none.
  bool storages_have_crcs() const {
    const auto filled = [&](std::size_t i) { return index().records()[i].nbytes > 0; };
    const auto has_crc = [&](std::size_t i) { return index().records()[i].crc != 0; };
    return std::ranges::any_of(data_records_, [&](auto i) { return filled(i) && has_crc(i); }) ||
           std::ranges::none_of(data_records_, filled);
  }
  std::vector<py::str> other_names() const {
    std::vector<py::str> names;
    names.reserve(other_records_.size());
    for (const std::size_t i : other_records_) {
      names.push_back(decode(index().records()[i].name));
    }
    return names;
  }
  std::optional<std::size_t> find(const py::str& name) const {
    const std::size_t i = reader_->index().find(encode(name));
    return i == ArchiveIndex::kNotFound ? std::nullopt : std::optional(i);
  }
  std::uint64_t payload_offset(std::size_t i) const {
    check(i);
    return without_gil([&] { return reader_->payload_offset(i); });
  }
  py::bytes read(std::size_t i, bool verify) const {
    check(i);
    const std::uint64_t offset = without_gil([&] { return reader_->stored_payload_offset(i); });
    const auto nbytes = static_cast<Py_ssize_t>(index().records()[i].nbytes);
    // Filled here: bytes of several MB would take as long to copy as to read.
    PyObject* const bytes = PyBytes_FromStringAndSize(nullptr, nbytes);
    if (bytes == nullptr) throw py::error_already_set();
    auto payload = py::reinterpret_steal<py::bytes>(bytes);
    without_gil([&] { reader_->read(i, offset, PyBytes_AS_STRING(bytes), verify); });
    return payload;
  }

  // Without targets, only checks.  Else target k, of bytes, gets records[k]; no record comes twice.
  std::vector<DamagedRecord> read_records(const std::vector<std::size_t>& records,
                                          const std::vector<py::object>& targets,
                                          std::size_t n_threads, bool verify) const {
    for (const std::size_t i : records) check(i);
    if (!targets.empty() && targets.size() != records.size()) {
      throw py::value_error("a target for each record");
    }
    std::vector<Destination> destinations;
    for (std::size_t k = 0; k < targets.size(); ++k) {
      const std::span<std::byte> memory = writable_bytes(targets[k]);
      if (memory.size() != index().records()[records[k]].nbytes) {
        throw py::value_error("a target has another size than its record");
      }
      if (!memory.empty()) destinations.push_back({records[k], 0, memory.size(), memory.data()});
    }
    const Poll poll = make_poll([] { return std::uint64_t{0}; }, py::none());
    return without_gil(
        [&] { return reader_->read_records(records, destinations, n_threads, verify, poll); });
  }
  void read_range(std::uint64_t offset, const py::handle& target, std::size_t n_threads) const {
    const std::span<std::byte> memory = writable_bytes(target);
    const Poll poll = make_poll([] { return std::uint64_t{0}; }, py::none());
    without_gil(
        [&] { reader_->read_range(offset, memory.data(), memory.size(), n_threads, poll); });
  }
  // (number, name, payload offset, location) of each record.  The location is where the storage was
  // saved that the unpickler has taken from it; None if it has not, or if Python made that storage.
  py::list places() const {
    const auto records = index().records();
    py::list result(records.size());
    std::vector<py::object> locations;
    locations.reserve(places_.size());
    for (const Place& place : places_) locations.push_back(py::str(place.location));
    for (std::size_t i = 0; i < records.size(); ++i) {
      const bool known = i < locations_.size() && locations_[i] != kNoPlace;
      result[i] = py::make_tuple(i, decode(records[i].name), records[i].payload_offset,
                                 known ? locations[locations_[i]] : py::none());
    }
    return result;
  }

  void start(const std::optional<std::vector<std::size_t>>& records, std::size_t n_threads,
             bool verify, bool exact_offsets) {
    const std::vector<std::size_t>& wanted = records ? *records : data_records_;
    for (const std::size_t i : wanted) check(i);
    forget_storages();
    without_gil([&] { reader_->start(wanted, n_threads, verify, exact_offsets); });
    is_reading_ = true;
  }
  // Places all storages without reading them; copies from them can be planned then.
  void reserve() {
    restore_.reset();
    forget_storages();
    reader_->reserve(data_records_);
    is_reading_ = false;
    restore_.emplace(*reader_, [this](std::size_t i) { return shared_storage(i); });
  }
  // Storages saved at `location` go to the CPU, or, after reserve(), to an accelerator.  Only for
  // such locations storages are handed to the unpickler.
  void place(const std::string& location, c10::Device device) {
    const auto place = std::ranges::find(places_, location, &Place::location);
    if (place == places_.end()) {
      places_.push_back({location, device});
    } else {
      place->device = device;
    }
  }
  // The storage on a device that gets the bytes of record i, which is not empty.
  py::object placed_storage(std::size_t i, c10::Device device) {
    check(i);
    return py::reinterpret_steal<py::object>(THPStorage_Wrap(placed(i, device)));
  }
  void plan_copy(const at::Tensor& target, const at::Tensor& source) {
    restore().add(target, source, record_of(source));
  }
  std::vector<DamagedRecord> fill(const std::vector<std::size_t>& records, std::size_t n_threads,
                                  bool verify, std::size_t max_pinned_nbytes,
                                  const py::object& callback) {
    for (; n_planned_ < placed_records_.size(); ++n_planned_) {
      const std::size_t i = placed_records_[n_planned_];
      restore().add(placed_[i], i);
    }
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    return without_gil(
        [&] { return restore().run(records, {n_threads, verify, max_pinned_nbytes}, poll); });
  }
  bool is_filled(std::size_t i) {
    check(i);
    return restore().is_filled(i);
  }
  std::vector<std::size_t> changed() { return restore().changed(); }
  // The records to whose storages anything but this reader refers.  The others are let go of, which
  // is how to find out: a storage keeps its Python object, and that keeps the storage.
  std::vector<std::size_t> referenced() {
    std::vector<std::size_t> records;
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      if (!storages_[i]) continue;
      const c10::weak_intrusive_ptr<c10::StorageImpl> weak = storages_[i].getWeakStorageImpl();
      record_by_storage_.erase(storages_[i].unsafeGetStorageImpl());
      storages_[i] = c10::Storage();
      if (auto found = weak.lock()) {
        record_by_storage_.emplace(found.get(), i);
        storages_[i] = c10::Storage(std::move(found));
        records.push_back(i);
      }
    }
    return records;
  }
  // The record whose reserved storage a tensor has.
  std::optional<std::size_t> record_of(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return std::nullopt;
    const auto found = record_by_storage_.find(tensor.storage().unsafeGetStorageImpl());
    return found == record_by_storage_.end() ? std::nullopt : std::optional(found->second);
  }
  std::vector<std::optional<std::size_t>> records_of(const py::list& tensors) const {
    std::vector<std::optional<std::size_t>> records;
    records.reserve(tensors.size());
    for (const py::handle tensor : tensors) records.push_back(record_of(unpack(tensor)));
    return records;
  }
  void wait(std::size_t i, const py::object& callback) {
    check(i);
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    without_gil([&] { reader_->wait(i, poll); });
  }
  std::vector<DamagedRecord> wait_all(const py::object& callback) {
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    return without_gil([&] { return reader_->wait_all(poll); });
  }
  py::object storage(std::size_t i) {
    check(i);
    return wrap_storage(shared_storage(i));
  }
  const c10::Storage* storage_of(std::string_view key, std::uint64_t nbytes,
                                 std::string_view location) override {
    const auto place = std::ranges::find(places_, location, &Place::location);
    if (place == places_.end()) return nullptr;
    const std::size_t i = find_data_record(key);
    if (i == ArchiveIndex::kNotFound || index().records()[i].nbytes != nbytes) return nullptr;
    // Nothing is to be copied to its place, and nobody asks where it was.
    if (nbytes == 0) return place->device.is_cpu() ? &shared_storage(i) : nullptr;
    locations_.resize(index().records().size(), kNoPlace);
    if (locations_[i] == kNoPlace) {
      locations_[i] = static_cast<std::uint32_t>(place - places_.begin());
    }
    return place->device.is_cpu() ? &shared_storage(i) : &placed(i, place->device);
  }
  // The load is over: storages given out become resizable, as any other.
  void release_storages() {
    for (std::vector<c10::Storage>* const storages : {&storages_, &empty_storages_, &placed_}) {
      for (c10::Storage& storage : *storages) {
        // Let go at once, while it is in the cache.
        if (const c10::Storage last = std::move(storage)) {
          last.unsafeGetStorageImpl()->set_resizable(true);
        }
      }
      storages->clear();
    }
    placed_records_.clear();
    n_planned_ = 0;
  }
  py::bytes read_at(std::uint64_t offset, std::uint64_t nbytes) const {
    if (nbytes > this->nbytes()) throw py::value_error("more than the archive holds");
    std::string bytes(nbytes, '\0');
    without_gil([&] { reader_->source().read_at(offset, bytes.data(), bytes.size()); });
    return {bytes};
  }
  void cancel() {
    without_gil([&] { reader_->cancel(); });
  }
  std::uint64_t nbytes_to_read() const { return reader_->nbytes_to_read(); }

 private:
  void check(std::size_t i) const {
    if (i >= reader_->index().records().size()) throw py::index_error("no such record");
  }

  static constexpr std::string_view kDataFolder = "data/";
  static constexpr std::uint32_t kNoPlace = ~std::uint32_t{0};

  // Keys mostly come in the order of the records.
  std::size_t find_data_record(std::string_view key) {
    const auto records = index().records();
    if (++last_found_ < records.size()) {
      const std::string_view next = records[last_found_].name;
      if (next.starts_with(kDataFolder) && next.substr(kDataFolder.size()) == key) {
        return last_found_;
      }
    }
    return last_found_ = index().find(std::string(kDataFolder).append(key));
  }

  // Empty storages are not shared: torch makes a new one for each reference.
  const c10::Storage& shared_storage(std::size_t i) {
    if (i < storages_.size() && storages_[i]) return storages_[i];
    LoadedPayload payload = reader_->payload(i);
    if (must_copy(payload) && is_reading_) wait(i, py::none());
    const std::uint64_t nbytes = payload.nbytes;
    c10::Storage storage = make_storage(std::move(payload));
    if (nbytes == 0) return empty_storages_.emplace_back(std::move(storage));
    if (restore_) record_by_storage_.emplace(storage.unsafeGetStorageImpl(), i);
    storages_.resize(index().records().size());
    return storages_[i] = std::move(storage);
  }

  // Not resizable until it is released: a shape larger than the storage is an error then.
  const c10::Storage& placed(std::size_t i, c10::Device device) {
    placed_.resize(index().records().size());
    if (!placed_[i]) {
      placed_[i] = empty_storage(index().records()[i].nbytes, device);
      placed_records_.push_back(i);
    }
    return placed_[i];
  }

  void forget_storages() {
    for (std::vector<c10::Storage>* const storages : {&storages_, &empty_storages_, &placed_}) {
      storages->clear();
    }
    placed_records_.clear();
    n_planned_ = 0;
    places_.clear();
    locations_.clear();
  }

  const ArchiveIndex& index() const { return reader_->index(); }

  Restore& restore() {
    if (!restore_) throw std::logic_error("reserve() comes first");
    return *restore_;
  }

  py::object keep_;  // outlives reader_
  std::unique_ptr<ArchiveReader> reader_;
  std::vector<std::size_t> data_records_;  // those of storages
  std::vector<std::size_t> other_records_;
  std::vector<c10::Storage> storages_;  // by record; none where it was not asked for
  std::vector<c10::Storage> empty_storages_;
  std::vector<Place> places_;
  std::vector<std::uint32_t> locations_;     // by record: into places_, or kNoPlace
  std::vector<c10::Storage> placed_;         // by record: on accelerators
  std::vector<std::size_t> placed_records_;  // in the order in which they were
  std::size_t n_planned_ = 0;                // of these, whose bytes are to be copied there
  std::size_t last_found_ = ArchiveIndex::kNotFound;
  bool is_reading_ = false;
  std::optional<Restore> restore_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> record_by_storage_;
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
           py::kw_only(), py::arg("n_threads"), py::arg("verify"))
      .def("read_range", &Reader::read_range, py::arg("offset"), py::arg("target"), py::kw_only(),
           py::arg("n_threads"))
      .def("places", &Reader::places)
      .def("start", &Reader::start, py::arg("records"), py::kw_only(), py::arg("n_threads"),
           py::arg("verify"), py::arg("exact_offsets"))
      .def("reserve", &Reader::reserve)
      .def(
          "place",
          [](Reader& self, const std::string& location, const py::handle& device) {
            self.place(location, unpack_device(device));
          },
          py::arg("location"), py::arg("device"))
      .def(
          "placed_storage",
          [](Reader& self, std::size_t i, const py::handle& device) {
            return self.placed_storage(i, unpack_device(device));
          },
          py::arg("record"), py::arg("device"))
      .def(
          "plan_copy",
          [](Reader& self, const py::handle& target, const py::handle& source) {
            self.plan_copy(unpack(target), unpack(source));
          },
          py::arg("target"), py::arg("source"))
      .def("fill", &Reader::fill, py::arg("records"), py::kw_only(), py::arg("n_threads"),
           py::arg("verify"), py::arg("max_pinned_nbytes"), py::arg("progress"))
      .def("is_filled", &Reader::is_filled, py::arg("record"))
      .def("changed", &Reader::changed)
      .def("referenced", &Reader::referenced)
      .def(
          "record_of",
          [](const Reader& self, const py::handle& tensor) {
            return self.record_of(unpack(tensor));
          },
          py::arg("tensor"))
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
      [](const py::bytes& tail, std::uint64_t nbytes) {
        const auto bytes = static_cast<std::string_view>(tail);
        const CentralDirectory where =
            find_central_directory(std::as_bytes(std::span(bytes)), nbytes);
        return std::pair(where.offset, where.nbytes);
      },
      py::arg("tail"), py::arg("nbytes"));
}

}  // namespace ptsave
