// ptsave._C.AppendedArchive, AppendBatch, NumberedStorages.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/write/appended_archive.h"
#include "pickle/out/pickler.h"
#include "tensors/append_batch.h"
#include "tensors/storage.h"

namespace ptsave {
namespace {

py::object appended_pickle(NumberedStorages& storages, const py::object& object) {
  const auto number = [&](const c10::Storage& storage, const at::Tensor* tensor,
                          c10::ScalarType dtype) {
    return storages.number(storage, tensor, dtype);
  };
  const std::optional<PickledObject> result = pickle_object(object.ptr(), number);
  if (!result) return py::none();
  return py::reinterpret_borrow<py::object>(result->data.get());
}

std::uint32_t number_of(NumberedStorages& storages, const py::object& storage,
                        const py::object& tensor, const py::object& dtype) {
  return storages.number(unpack_storage(storage),
                         tensor.is_none() ? nullptr : &unpack_tensor(tensor), unpack_dtype(dtype));
}

// Returns the statistics of `measured`, if they were computed while copying its storage.
py::object add(AppendBatch& batch, const NumberedStorages& storages, const py::bytes& pickle,
               bool copy, std::size_t n_threads, const py::object& measured) {
  const auto part = static_cast<std::string_view>(pickle);
  const StorageList& fresh = storages.fresh();
  std::optional<Element> element;
  c10::ScalarType type = c10::ScalarType::Undefined;
  if (!measured.is_none() && fresh.storages.size() == 1) {
    const at::Tensor& tensor = unpack_tensor(measured);
    type = tensor.scalar_type();
    if (is_storage(tensor, fresh.storages.front())) element = element_of(type);
  }
  std::optional<Statistics> found;
  if (!fresh.storages.empty()) {
    found = without_gil(
        [&] { return batch.add(fresh, storages.first_number(), copy, n_threads, element); });
  }
  batch.end_group(part);
  if (!found) return py::none();
  return fields_of(*found, type);
}

std::pair<std::uint64_t, std::uint64_t> write(AppendBatch& batch, AppendedArchive& archive,
                                              const std::string& journal_name, std::size_t n_groups,
                                              bool direct, const WriteOptions& options,
                                              const py::object& callback) {
  const Poll poll = make_poll([&] { return archive.nbytes_written(); }, callback);
  const AppendBatch::Parts parts = without_gil(
      [&] { return batch.write(archive, journal_name, n_groups, direct, options, poll); });
  return {parts.offset, parts.nbytes};
}

// Name, header offset, size, CRC, end.
using FoundRecord =
    std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint32_t, std::uint64_t>;

py::bytes closing_bytes(const std::string& root, std::uint64_t alignment,
                        const std::vector<FoundRecord>& records, const py::bytes& pickle) {
  WrittenRecords written(root, alignment);
  for (const auto& [name, header_offset, nbytes, crc, end] : records) {
    written.add(name, header_offset, nbytes, crc, end);
  }
  return written.closing_bytes(static_cast<std::string_view>(pickle), true);
}

}  // namespace

void bind_appending(py::module_& module) {
  py::class_<NumberedStorages>(module, "NumberedStorages")
      .def(py::init<>())
      .def("pickle", &appended_pickle, "obj"_a)
      .def("number", &number_of, "storage"_a, "tensor"_a, "dtype"_a)
      .def_property_readonly("fresh_nbytes", &NumberedStorages::fresh_nbytes)
      .def("commit", &NumberedStorages::commit)
      .def("rollback", &NumberedStorages::rollback)
      .def("forget", &NumberedStorages::forget);
  py::class_<AppendBatch>(module, "AppendBatch")
      .def(py::init<std::size_t>(), py::kw_only(), "slab_nbytes"_a)
      .def("add", &add, "storages"_a, "pickle"_a, py::kw_only(), "copy"_a, "n_threads"_a,
           "measured"_a = py::none())
      .def_property_readonly("n_groups", &AppendBatch::n_groups)
      .def("n_groups_within", &AppendBatch::n_groups_within, "nbytes"_a)
      .def_property_readonly("is_staged", &AppendBatch::is_staged)
      .def("write", &write, "archive"_a, "journal_name"_a, py::kw_only(), "n_groups"_a, "direct"_a,
           "options"_a, "progress"_a)
      .def("release", [](AppendBatch& self) { without_gil([&] { self.release(); }); })
      .def("abandon", &AppendBatch::abandon);
  py::class_<AppendedArchive>(module, "AppendedArchive")
      .def(py::init([](std::string path, std::string display, const std::string& root,
                       std::uint64_t alignment) {
             const AppendedArchive::Target target{std::move(path), std::move(display)};
             return without_gil(
                 [&] { return std::make_unique<AppendedArchive>(target, root, alignment); });
           }),
           "path"_a, "display"_a, py::kw_only(), "root"_a, "alignment"_a)
      .def(
          "read",
          [](const AppendedArchive& self, std::uint64_t offset, std::uint64_t nbytes) {
            return py::bytes(without_gil([&] { return self.read(offset, nbytes); }));
          },
          "offset"_a, "nbytes"_a)
      .def("sync", [](AppendedArchive& self) { without_gil([&] { self.sync(); }); })
      .def(
          "close",
          [](AppendedArchive& self, const py::bytes& pickle, bool compute_crcs, bool durable) {
            const auto data = static_cast<std::string_view>(pickle);
            without_gil([&] { self.close(data, compute_crcs, durable); });
          },
          "pickle"_a, py::kw_only(), "compute_crcs"_a, "durable"_a)
      .def("keep", &AppendedArchive::keep)
      .def_property_readonly(
          "temporary_name",
          [](const AppendedArchive& self) { return py::bytes(self.temporary_name()); })
      .def("discard", &AppendedArchive::discard)
      .def_property_readonly("nbytes", &AppendedArchive::nbytes);
  module.attr("DICT_HEAD") = py::bytes(kDictHead.data(), kDictHead.size());
  module.attr("STOP") = py::bytes(&kStop, 1);
  module.def("closing_bytes", &closing_bytes, "root"_a, "alignment"_a, "records"_a, "pickle"_a);
}

}  // namespace ptsave
