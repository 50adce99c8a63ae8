// ptsave._C's functions that examine attributes and values of many objects.
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

// Runs no Python code, so no dict changes meanwhile.
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

// The pairs (name, object) whose object's own __dict__ has a true value for the attribute.  From
// Python, the attributes of a torch.nn.Module take three times as long, because of its
// `__getattr__`.
py::list having(const py::list& pairs, const py::str& attribute) {
  py::list result;
  for (const py::handle pair : pairs) {
    if (!PyTuple_Check(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) {
      throw py::type_error("expected pairs");
    }
    const auto attributes = py::reinterpret_steal<py::object>(
        PyObject_GenericGetDict(PyTuple_GET_ITEM(pair.ptr(), 1), nullptr));
    if (!attributes) throw py::error_already_set();
    PyObject* const value = PyDict_GetItemWithError(attributes.ptr(), attribute.ptr());
    if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    const int is_true = value == nullptr ? 0 : PyObject_IsTrue(value);
    if (is_true < 0) throw py::error_already_set();
    if (is_true != 0) result.append(pair);
  }
  return result;
}

}  // namespace

void bind_names(py::module_& module) {
  module.def("find_values", &find_values, py::arg("dicts"), py::arg("values"));
  module.def("having", &having, py::arg("pairs"), py::arg("attribute"));
}

}  // namespace ptsave
