// ptsave._C's functions over columns of Python objects: kinds of tensors and facts about them,
// copies of small ones, instances of a class, rows of bytes, attributes.  In Python, a step for
// each of a state dict's 100,000 tensors would take a second.
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "bindings/bindings.h"
#include "device/side_streams.h"
#include "tensors/storage.h"

namespace ptsave {
namespace {

PyObject* item_of(const py::list& list, std::size_t i) {
  return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
}

void append_number(std::string& bytes, std::int64_t number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// Flags, dtype, layout, device, shape and strides, as bytes.  Asks the driver about pinned memory
// if `with_pinned`.
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

// For each value, the index of the first value of its kind; -1 if its type is not in `types`.
py::list tensor_kinds(const py::list& values, const py::tuple& types, bool pinned) {
  std::unordered_map<std::string, py::object> first;
  const py::int_ other(-1);
  py::list result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyObject* const value = item_of(values, i);
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

// Whether a tensor has strided numbers on a real device.  Other kinds of tensors have other
// dispatch keys: sparse, quantized, nested and meta tensors, lazy conjugates, wrappers.  An
// inference tensor lacks autograd's keys.
bool is_memory(const at::Tensor& tensor, bool is_inference) {
  using c10::DispatchKey;
  constexpr std::array kDevices = {
      std::array{DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU},
      std::array{DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA},
      std::array{DispatchKey::MPS, DispatchKey::AutogradMPS, DispatchKey::AutocastMPS},
      std::array{DispatchKey::XPU, DispatchKey::AutogradXPU, DispatchKey::AutocastXPU},
      std::array{DispatchKey::PrivateUse1, DispatchKey::AutogradPrivateUse1,
                 DispatchKey::AutocastPrivateUse1}};
  const c10::DispatchKeySet keys = tensor.key_set();
  return std::ranges::any_of(kDevices, [&](const auto& device) {
    const auto [dense, autograd, autocast] = device;
    const c10::DispatchKeySet tracked({dense, DispatchKey::ADInplaceOrView, autograd});
    return keys.has_all(is_inference ? c10::DispatchKeySet(dense) : tracked) &&
           tracked.add(autocast).has_all(keys);
  });
}

bool is_real(c10::ScalarType type) {
  constexpr std::array kTypes = {at::kBool, at::kByte, at::kChar,     at::kShort, at::kInt,
                                 at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  return std::ranges::find(kTypes, type) != kTypes.end();
}

// Whether `copy_` converts without a warning or error.  False from complex to real numbers, and for
// types that torch converts only in part.
bool converts_silently(c10::ScalarType source, c10::ScalarType target) {
  return (is_real(source) || c10::isComplexType(source)) &&
         (c10::isComplexType(target) || (is_real(source) && is_real(target)));
}

// Whether `target.copy_(source)` copies numbers and can neither fail nor warn.
bool copies_plainly(const py::handle& into, const py::handle& from) {
  if (!THPVariable_CheckExact(into.ptr()) || !THPVariable_CheckExact(from.ptr())) return false;
  const at::Tensor& target = THPVariable_Unpack(into.ptr());
  const at::Tensor& source = THPVariable_Unpack(from.ptr());
  // A source may be an inference tensor.
  if (!is_memory(target, false) || !is_memory(source, source.is_inference())) return false;
  if (target.sizes() != source.sizes()) return false;
  // copy_ refuses to write to a place twice, and to read bytes that it overwrites.
  if (!target.is_contiguous() && at::has_internal_overlap(target) == at::MemOverlap::Yes) {
    return false;
  }
  const bool is_same_type = target.scalar_type() == source.scalar_type();
  if (target.is_alias_of(source)) {
    return is_same_type && at::get_overlap_status(target, source) == at::MemOverlapStatus::Full;
  }
  return is_same_type || converts_silently(source.scalar_type(), target.scalar_type());
}

// Copying this many bytes takes less time than a call of torch.
constexpr std::size_t kSmallNbytes = 16 << 10;

bool is_small(const at::Tensor& tensor) {
  const std::size_t nbytes = tensor.nbytes();
  const c10::ScalarType type = tensor.scalar_type();
  const std::size_t offset = static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize();
  return nbytes != 0 && nbytes <= kSmallNbytes && tensor.is_cpu() && tensor.is_contiguous() &&
         (is_real(type) || c10::isComplexType(type)) &&
         offset + nbytes <= tensor.storage().nbytes() && !tensor._fw_grad(/*level=*/0).defined();
}

// Copies pairs (target, source) of small tensors of one type, from `begin` on, as `copy_` does
// under no_grad.  copies_plainly() must hold for all pairs.  Returns the index of the first pair
// that torch has to copy.
std::size_t copy_small(const py::list& pairs, std::size_t begin) {
  for (std::size_t i = begin; i < pairs.size(); ++i) {
    const py::tuple pair = pairs[i];
    if (pair.size() != 2 || !THPVariable_Check(pair[0].ptr()) ||
        !THPVariable_Check(pair[1].ptr())) {
      throw py::type_error("expected pairs of tensors");
    }
    const at::Tensor& target = THPVariable_Unpack(pair[0].ptr());
    const at::Tensor& source = THPVariable_Unpack(pair[1].ptr());
    if (target.is_inference() || target.scalar_type() != source.scalar_type() ||
        target.nbytes() != source.nbytes() || !is_small(target) || !is_small(source)) {
      return i;
    }
    // memmove, because a tensor may be copied to itself.
    std::memmove(target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes());
    target.unsafeGetTensorImpl()->bump_version();
  }
  return pairs.size();
}

bool has_elements_in_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_meta() && tensor.numel() != 0 &&
         tensor.has_storage() && tensor.storage().data_ptr();
}

// Uninitialized contiguous tensors in CPU memory.
py::list empty_tensors(const std::vector<std::vector<std::int64_t>>& shapes,
                       const py::list& dtypes) {
  if (shapes.size() != dtypes.size()) throw py::value_error("expected lists of equal size");
  py::list result(shapes.size());
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    result[i] = wrap_tensor(at::detail::empty_cpu(shapes[i], unpack_dtype(item_of(dtypes, i))));
  }
  return result;
}

// The address of each tensor: 0 if it has no elements in memory, None if it is of a subclass.
py::list addresses(const py::list& tensors) {
  py::list result(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = unpack_tensor(item_of(tensors, i));
    if (!THPVariable_CheckExact(item_of(tensors, i))) {
      result[i] = py::none();
    } else {
      result[i] = py::int_(has_elements_in_memory(tensor)
                               ? reinterpret_cast<std::uintptr_t>(tensor.mutable_data_ptr())
                               : 0);
    }
  }
  return result;
}

// For each tensor and dtype, whether contiguous elements of the dtype in a file can be read
// straight into the tensor.
std::vector<bool> take_bytes(const py::list& tensors, const py::list& dtypes) {
  if (tensors.size() != dtypes.size()) throw py::value_error("expected lists of equal size");
  std::vector<bool> result(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = unpack_tensor(item_of(tensors, i));
    PyObject* const object = item_of(tensors, i);
    result[i] = THPVariable_CheckExact(object) &&
                tensor.scalar_type() == unpack_dtype(item_of(dtypes, i)) &&
                tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() &&
                !tensor.is_neg() &&
                (tensor.is_cpu() || SideStreams::are_supported(tensor.device()));
  }
  return result;
}

// Whether no two tensors can overlap in memory.
bool are_apart(const py::list& tensors) {
  struct Extent {
    c10::Device device;
    std::uintptr_t begin;
    std::uintptr_t end;
  };
  std::vector<Extent> extents;
  extents.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = unpack_tensor(item_of(tensors, i));
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.mutable_data_ptr());
    const std::size_t nbytes = tensor.is_contiguous() ? tensor.nbytes() : tensor.storage().nbytes();
    extents.push_back({tensor.device(), begin, begin + nbytes});
  }
  std::ranges::sort(extents, {}, [](const Extent& extent) {
    return std::tuple(extent.device.type(), extent.device.index(), extent.begin);
  });
  return std::ranges::adjacent_find(extents, [](const Extent& one, const Extent& other) {
           return one.device == other.device && one.end > other.begin;
         }) == extents.end();
}

// The values of an attribute or a column.  A list has a value for each row; any other object is the
// value of every row.
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
    if (size && *size != column.size()) throw py::value_error("expected lists of equal size");
    size = column.size();
  }
  if (!size) throw py::value_error("expected a list");
  return *size;
}

// Makes instances without the class's initializer, and sets attributes as object.__setattr__ does.
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

// Packs values row by row: bytes unchanged, an int as 32 bits, a str as its size in 32 bits and
// UTF-8.  Numbers are little-endian.
py::bytes packed_rows(const py::tuple& values) {
  const std::vector<Column> columns(values.begin(), values.end());
  std::string bytes;
  const std::size_t n_rows = common_size(columns);
  for (std::size_t i = 0; i < n_rows; ++i) {
    for (const Column& column : columns) append_value(bytes, column[i]);
  }
  return {bytes};
}

py::object dtype_of(const at::Tensor& tensor) {
  return py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
}

py::tuple tuple_of(at::IntArrayRef numbers) {
  py::tuple result(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) result[i] = py::int_(numbers[i]);
  return result;
}

// Makes a torch.Size by calling its type, because torch exports no function for it.
py::object shape_of(const at::Tensor& tensor) {
  auto* const type = reinterpret_cast<PyObject*>(&THPSizeType);
  PyObject* const shape = PyObject_CallOneArg(type, tuple_of(tensor.sizes()).ptr());
  if (shape == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(shape);
}

std::size_t storage_nbytes_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() : 0;
}

// The size in bytes, as torch sizes storages: if elements share bytes, each row begins a new byte.
std::int64_t nbytes_of(const at::Tensor& tensor) {
  const std::int64_t n_shared = elements_per_byte(tensor.scalar_type());
  const auto itemsize = static_cast<std::int64_t>(tensor.itemsize());
  if (n_shared == 1 || tensor.dim() == 0 || tensor.numel() == 0) return tensor.numel() * itemsize;
  const std::int64_t row = tensor.size(-1);
  return tensor.numel() / row * ((row + n_shared - 1) / n_shared);
}

// (dtype, shape, stride, offset in its storage, its size, the storage's size) of each tensor, the
// last three in bytes; None for a tensor that is nested or not strided.
py::list tensor_facts(const py::list& tensors) {
  py::list result(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = unpack_tensor(item_of(tensors, i));
    if (tensor.layout() != at::kStrided || tensor.is_nested()) {
      result[i] = py::none();
      continue;
    }
    result[i] = py::make_tuple(dtype_of(tensor), shape_of(tensor), tuple_of(tensor.strides()),
                               byte_offset(tensor), nbytes_of(tensor), storage_nbytes_of(tensor));
  }
  return result;
}

using Found = std::tuple<std::size_t, py::object, std::size_t>;

// This runs no Python code, so no dict changes meanwhile.
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

// The pairs (name, object) whose object's own __dict__ has a true value for the attribute.  In
// Python, this takes three times as long for a torch.nn.Module, because of its `__getattr__`.
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

void bind_columns(py::module_& module) {
  module.def("tensor_kinds", &tensor_kinds, "values"_a, "types"_a, py::kw_only(),
             "pinned"_a = false);
  module.def("empty_tensors", &empty_tensors, "shapes"_a, "dtypes"_a);
  module.def("addresses", &addresses, "tensors"_a);
  module.def("take_bytes", &take_bytes, "tensors"_a, "dtypes"_a);
  module.def("are_apart", &are_apart, "tensors"_a);
  module.def("copies_plainly", &copies_plainly, "target"_a, "source"_a);
  module.def("copy_small", &copy_small, "pairs"_a, "begin"_a);
  module.def("instances", &instances, "kind"_a, "attributes"_a);
  module.def("packed_rows", &packed_rows, "columns"_a);
  module.def("tensor_facts", &tensor_facts, "tensors"_a);
  module.def("find_values", &find_values, "dicts"_a, "values"_a);
  module.def("having", &having, "pairs"_a, "attribute"_a);
}

}  // namespace ptsave
