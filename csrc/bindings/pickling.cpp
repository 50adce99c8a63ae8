// ptsave._C's functions for pickles: pickle, unpickle, scan, and lists of storages.
#include <pybind11/stl.h>
#include <torch/csrc/Storage.h>

#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "pickle/in/unpickler.h"
#include "pickle/out/pickler.h"
#include "pickle/scan/scan.h"
#include "tensors/storage.h"

namespace ptsave {
namespace {

py::object pickled(const py::object& object) {
  std::optional<PickledObject> result = pickle_object(object.ptr());
  if (!result) return py::none();
  return py::make_tuple(py::reinterpret_steal<py::bytes>(result->data.release()),
                        StorageList{std::move(result->storages)});
}

StorageList storage_list(const std::vector<py::object>& objects) {
  StorageList list;
  list.storages.reserve(objects.size());
  for (const py::object& object : objects) list.storages.push_back(unpack_storage(object));
  return list;
}

// Returns the storages as torch.UntypedStorage objects.
py::list untyped_storages(const StorageList& list) {
  py::list storages;
  for (const c10::Storage& storage : list.storages) {
    PyObject* const wrapped = THPStorage_Wrap(storage);
    if (wrapped == nullptr) throw py::error_already_set();
    storages.append(py::reinterpret_steal<py::object>(wrapped));
  }
  return storages;
}

}  // namespace

void bind_pickling(py::module_& module) {
  py::class_<StorageList>(module, "StorageList")
      .def(py::init(&storage_list), "storages"_a)
      .def("__len__", [](const StorageList& self) { return self.storages.size(); })
      .def_property_readonly("in_reach", &StorageList::in_reach)
      .def("staging_nbytes", &StorageList::staging_nbytes, "alignment"_a);
  module.def("rebuilds_blindly", &rebuilds_blindly, "pickle"_a, "dtypes"_a,
             "opaque"_a = std::unordered_set<std::string>());
  module.def("unjustified_claim", &unjustified_claim, "pickle"_a);
  module.def("pickle_object", &pickled, "obj"_a);
  module.def(
      "unfilled_storages",
      [](const std::vector<std::uint64_t>& sizes) { return StorageList{unfilled_storages(sizes)}; },
      "sizes"_a);
  module.def("untyped_storages", &untyped_storages, "storages"_a);
  module.def(
      "unpickle_weights_only",
      [](const py::bytes& pickle, const py::object& persistent_load, const py::object& encoding,
         StorageSource* storages, const py::object& unpickler_type) {
        Object result = unpickle_weights_only(
            static_cast<std::string_view>(pickle), persistent_load.ptr(), encoding.ptr(), storages,
            unpickler_type.is_none() ? nullptr : unpickler_type.ptr());
        return py::reinterpret_steal<py::object>(result.release());
      },
      "pickle"_a, "persistent_load"_a, py::kw_only(), "encoding"_a, "storages"_a.none(true),
      "unpickler_type"_a = py::none());
}

}  // namespace ptsave
