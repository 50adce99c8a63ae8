// What ptsave._C knows about pickles.
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <unordered_set>

#include "bindings/bindings.h"
#include "pickle/scan.h"
#include "pickle/unpickler.h"

namespace py = pybind11;

namespace ptsave {

void bind_pickling(py::module_& module) {
  module.def(
      "rebuilds_blindly",
      [](const py::bytes& pickle, const std::unordered_set<std::string>& dtypes) {
        return rebuilds_blindly(static_cast<std::string_view>(pickle), dtypes);
      },
      py::arg("pickle"), py::arg("dtypes"));
  module.def(
      "unpickle_weights_only",
      [](const py::bytes& pickle, const py::object& persistent_load, const py::object& encoding,
         StorageSource* storages) {
        Object result = unpickle_weights_only(static_cast<std::string_view>(pickle),
                                              persistent_load.ptr(), encoding.ptr(), storages);
        return py::reinterpret_steal<py::object>(result.release());
      },
      py::arg("pickle"), py::arg("persistent_load"), py::kw_only(), py::arg("encoding"),
      py::arg("storages").none(true));
}

}  // namespace ptsave
