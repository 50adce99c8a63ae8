// ptsave._C.find_values.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace ptsave {
namespace {

using Found = std::tuple<std::size_t, py::object, std::size_t>;

// Runs no code of anybody's, so that no dict changes meanwhile.
std::vector<Found> find_values(const std::vector<py::dict>& dicts,
                               const std::vector<py::object>& values) {
  std::vector<Found> result;
  for (std::size_t i = 0; i < dicts.size(); ++i) {
    Py_ssize_t at = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(dicts[i].ptr(), &at, &key, &value) != 0) {
      const auto known = std::ranges::find_if(
          values, [value](const py::object& object) { return object.ptr() == value; });
      if (known == values.end()) continue;
      const auto number = static_cast<std::size_t>(std::distance(values.begin(), known));
      result.emplace_back(i, py::reinterpret_borrow<py::object>(key), number);
    }
  }
  return result;
}

}  // namespace

void bind_names(py::module_& module) {
  module.def("find_values", &find_values, py::arg("dicts"), py::arg("values"));
}

}  // namespace ptsave
