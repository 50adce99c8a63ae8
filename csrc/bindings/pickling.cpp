// What ptsave._C knows about pickles.
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <unordered_set>

#include "bindings/bindings.h"
#include "pickle/scan.h"

namespace py = pybind11;

namespace ptsave {

void bind_pickling(py::module_& module) {
  module.def(
      "rebuilds_blindly",
      [](const py::bytes& pickle, const std::unordered_set<std::string>& dtypes) {
        return rebuilds_blindly(static_cast<std::string_view>(pickle), dtypes);
      },
      py::arg("pickle"), py::arg("dtypes"));
}

}  // namespace ptsave
