// ptsave._C's functions over columns of Python objects: kinds of tensors, instances of a class,
// rows of bytes.  A state dict has 100,000 tensors, and a step of Python for each takes a second.
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace ptsave {
namespace {

void append_number(std::string& bytes, std::int64_t number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// Flags, dtype, layout, device, shape and strides, as bytes.  Whether memory is pinned is asked of
// the driver, and only if that is wanted.
std::string kind_of(const at::Tensor& tensor, bool with_pinned) {
  const bool is_strided = tensor.layout() == at::kStrided;
  std::string kind;
  for (const bool flag :
       {tensor.requires_grad(), with_pinned && tensor.is_cpu() && tensor.is_pinned(),
        is_strided && tensor.is_contiguous(), tensor.is_conj(), tensor.is_neg()}) {
    kind.push_back(flag ? '1' : '0');
  }
  kind.push_back(static_cast<char>(tensor.scalar_type()));
  kind.push_back(static_cast<char>(tensor.layout()));
  kind.push_back(static_cast<char>(tensor.device().type()));
  append_number(kind, tensor.device().index());
  for (const std::int64_t size : tensor.sizes()) append_number(kind, size);
  if (is_strided) {
    for (const std::int64_t stride : tensor.strides()) append_number(kind, stride);
  }
  return kind;
}

// Of each value the index of the first one like it; -1 for one whose type is none of `types`.
py::list tensor_kinds(const py::list& values, const py::tuple& types, bool pinned) {
  std::unordered_map<std::string, py::object> first;
  const py::int_ other(-1);
  py::list result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyObject* const value = PyList_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i));
    bool is_plain = false;
    for (const py::handle type : types) {
      is_plain = is_plain || reinterpret_cast<PyObject*>(Py_TYPE(value)) == type.ptr();
    }
    if (!is_plain || !THPVariable_Check(value) || THPVariable_Unpack(value).is_nested()) {
      result[i] = other;
      continue;
    }
    auto& number = first[kind_of(THPVariable_Unpack(value), pinned)];
    if (!number) number = py::int_(i);
    result[i] = number;
  }
  return result;
}

// Values of an attribute or a row: a list has one for each, anything else is the value of all.
class Column {
 public:
  explicit Column(py::handle values) : values_(values), is_list_(PyList_CheckExact(values.ptr())) {}

  bool is_list() const { return is_list_; }
  std::size_t size() const { return static_cast<std::size_t>(PyList_GET_SIZE(values_.ptr())); }
  PyObject* operator[](std::size_t i) const {
    return is_list_ ? PyList_GET_ITEM(values_.ptr(), static_cast<Py_ssize_t>(i)) : values_.ptr();
  }

 private:
  py::handle values_;
  bool is_list_;
};

std::size_t common_size(const std::vector<Column>& columns) {
  std::optional<std::size_t> size;
  for (const Column& column : columns) {
    if (!column.is_list()) continue;
    if (size && *size != column.size()) throw py::value_error("expected lists of one length");
    size = column.size();
  }
  if (!size) throw py::value_error("expected a list");
  return *size;
}

// Sets the attributes as object.__setattr__ does, without the class's initializer.
py::list instances(const py::type& kind, const py::dict& attributes) {
  std::vector<py::str> names;
  std::vector<Column> columns;
  for (const auto& [name, values] : attributes) {
    names.push_back(py::reinterpret_borrow<py::str>(name));
    columns.emplace_back(values);
  }
  auto* const type = reinterpret_cast<PyTypeObject*>(kind.ptr());
  if (type->tp_new != PyBaseObject_Type.tp_new) throw py::type_error("expected a plain class");
  const py::tuple nothing;
  py::list result(common_size(columns));
  for (std::size_t i = 0; i < result.size(); ++i) {
    PyObject* const made = type->tp_new(type, nothing.ptr(), nullptr);
    if (made == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), made);
    for (std::size_t k = 0; k < names.size(); ++k) {
      if (PyObject_GenericSetAttr(made, names[k].ptr(), columns[k][i]) != 0) {
        throw py::error_already_set();
      }
    }
  }
  return result;
}

void append_uint32(std::string& bytes, std::uint64_t number) {
  if (number > UINT32_MAX) throw py::value_error("expected a number of 32 bits");
  for (int shift = 0; shift < 32; shift += 8) {
    bytes.push_back(static_cast<char>(number >> shift & 0xFF));
  }
}

void append_value(std::string& bytes, PyObject* value) {
  if (PyBytes_CheckExact(value)) {
    bytes.append(PyBytes_AS_STRING(value), static_cast<std::size_t>(PyBytes_GET_SIZE(value)));
  } else if (PyLong_CheckExact(value)) {
    const std::uint64_t number = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    append_uint32(bytes, number);
  } else if (PyUnicode_CheckExact(value)) {
    const auto text = py::reinterpret_steal<py::bytes>(
        PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass"));
    if (!text) throw py::error_already_set();
    append_uint32(bytes, static_cast<std::uint64_t>(PyBytes_GET_SIZE(text.ptr())));
    append_value(bytes, text.ptr());
  } else {
    throw py::type_error("expected bytes, int or str");
  }
}

// Row by row: bytes as they are, an int as 32 bits, a str as its size in 32 bits and UTF-8; numbers
// are little-endian.
py::bytes packed_rows(const py::tuple& values) {
  const std::vector<Column> columns(values.begin(), values.end());
  std::string bytes;
  const std::size_t n_rows = common_size(columns);
  for (std::size_t i = 0; i < n_rows; ++i) {
    for (const Column& column : columns) append_value(bytes, column[i]);
  }
  return {bytes};
}

}  // namespace

void bind_columns(py::module_& module) {
  module.def("tensor_kinds", &tensor_kinds, py::arg("values"), py::arg("types"), py::kw_only(),
             py::arg("pinned") = false);
  module.def("instances", &instances, py::arg("kind"), py::arg("attributes"));
  module.def("packed_rows", &packed_rows, py::arg("columns"));
}

}  // namespace ptsave
