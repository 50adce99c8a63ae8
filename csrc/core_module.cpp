// The Python module ptsave._core: the functions that need no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/interpreter.h"
#include "core/crc/crc32.h"
#include "core/format/archive.h"
#include "core/io/file.h"
#include "core/io/ranges.h"
#include "core/read/reader.h"
#include "pickle/outline/outline.h"

namespace ptsave {
namespace {

PyTypeObject* outlined_tensor_type() {
  static PyObject* const kType = make_outlined_tensor_type().release();
  return reinterpret_cast<PyTypeObject*>(kType);
}

// The records of an archive's storages, and the places of storages that a pickle refers to.
class PlacedRecords final : public StorageRecords {
 public:
  explicit PlacedRecords(const ArchiveIndex& index) : index_(index), data_(index) {}

  std::optional<std::size_t> find(std::string_view key, std::uint64_t nbytes) override {
    const std::size_t i = data_.find(key);
    if (i == ArchiveIndex::kNotFound || index_.records()[i].nbytes != nbytes) return std::nullopt;
    return i;
  }

  // (number, name, payload offset, location), as Reader.places() of ptsave._C returns it.
  Object place_of(std::size_t i, PyObject* location) override {
    const IndexedRecord& record = index_.records()[i];
    const py::tuple place =
        py::make_tuple(i, decode(record.name), record.payload_offset, py::handle(location));
    return Object::borrow(place.ptr());
  }

 private:
  const ArchiveIndex& index_;
  DataRecords data_;
};

class Archive {
 public:
  explicit Archive(ByteSource source)
      : reader_(without_gil([&] { return std::make_unique<ArchiveReader>(std::move(source)); })),
        data_(index()) {}

  static std::unique_ptr<Archive> open_descriptor(int fd, std::uint64_t offset,
                                                  const std::string& name, bool direct) {
    return std::make_unique<Archive>(
        ByteSource(File::reopen_for_reading(fd, name), offset, direct_reads(direct)));
  }

  std::uint64_t nbytes() const { return reader_->source().nbytes(); }
  bool all_stored() const { return index().all_stored(); }
  // Whether every record can be verified.
  bool has_crcs() const { return index().has_crcs() && data_.have_crcs(); }
  std::size_t n_records() const { return index().records().size(); }
  std::optional<std::uint64_t> nbytes_of(const py::str& name) const {
    const std::size_t i = index().find(encode(name));
    if (i == ArchiveIndex::kNotFound) return std::nullopt;
    return index().records()[i].nbytes;
  }

  py::bytes read(const py::str& name) const {
    const std::size_t i = index().find(encode(name));
    if (i == ArchiveIndex::kNotFound) throw py::key_error("no such record");
    return read_record(*reader_, i, true);
  }

  // The pickle's outline, with all storages placed, in a tuple of one item.  None if only torch can
  // read the pickle.
  py::object outline(const py::bytes& pickle) {
    without_gil([&] { reader_->reserve(data_.storages()); });
    PlacedRecords records(index());
    Object found =
        ptsave::outline(static_cast<std::string_view>(pickle), records, outlined_tensor_type());
    if (!found) return py::none();
    return py::make_tuple(py::reinterpret_steal<py::object>(found.release()));
  }

  // Whether the records [begin, end) match their checksums.
  bool are_whole(std::size_t begin, std::size_t end, std::size_t n_threads) const {
    if (begin > end || end > n_records()) throw py::index_error("no such record");
    std::vector<std::size_t> records;
    for (std::size_t i = begin; i < end; ++i) records.push_back(i);
    const Poll poll = make_poll();
    return without_gil(
               [&] { return reader_->read_records(std::move(records), {}, n_threads, true, poll); })
        .empty();
  }
  // For each record, the offset at which the next one begins: the record ends there or earlier.
  std::vector<std::uint64_t> limits() const {
    std::vector<std::uint64_t> found;
    found.reserve(n_records());
    for (const IndexedRecord& record : index().records()) found.push_back(record.limit);
    return found;
  }

 private:
  const ArchiveIndex& index() const { return reader_->index(); }

  std::unique_ptr<ArchiveReader> reader_;
  DataRecords data_;
};

}  // namespace
}  // namespace ptsave

PYBIND11_MODULE(_core, module) {
  using namespace ptsave;
  register_errors(module);
  module.attr("OutlinedTensor") =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(outlined_tensor_type()));
  py::class_<Archive>(module, "Archive", py::module_local())
      .def_static("open_descriptor", &Archive::open_descriptor, "fd"_a, "offset"_a, "name"_a,
                  py::kw_only(), "direct"_a)
      .def_property_readonly("nbytes", &Archive::nbytes)
      .def_property_readonly("all_stored", &Archive::all_stored)
      .def_property_readonly("has_crcs", &Archive::has_crcs)
      .def_property_readonly("n_records", &Archive::n_records)
      .def("nbytes_of", &Archive::nbytes_of, "name"_a)
      .def("read", &Archive::read, "name"_a)
      .def("outline", &Archive::outline, "pickle"_a)
      .def("are_whole", &Archive::are_whole, "begin"_a, "end"_a, py::kw_only(), "n_threads"_a)
      .def("limits", &Archive::limits);
  module.def(
      "crcs_of_ranges",
      [](int fd, std::string name,
         const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ranges,
         std::size_t n_threads) {
        const File file = File::duplicate(fd, std::move(name));
        const Poll poll = make_poll();
        return without_gil([&] { return crcs_of_ranges(file, ranges, n_threads, poll); });
      },
      "fd"_a, "name"_a, "ranges"_a, py::kw_only(), "n_threads"_a);
  module.def(
      "target_of_temporary",
      [](const std::string& entry) { return py::bytes(target_of_temporary(entry)); }, "entry"_a);
}
