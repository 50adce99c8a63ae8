// Returns facts about many tensors in one call, because Python calls for each attribute of 100,000
// tensors would take a second.
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>

#include "bindings/bindings.h"
#include "device/side_streams.h"
#include "tensors/storage.h"

namespace py = pybind11;

namespace ptsave {
namespace {

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
// last three in bytes; None for a tensor that is not strided, or nested.
py::list tensor_facts(const py::list& tensors) {
  py::list result(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!THPVariable_Check(tensors[i].ptr())) throw py::type_error("expected a tensor");
    const at::Tensor& tensor = THPVariable_Unpack(tensors[i].ptr());
    if (tensor.layout() != at::kStrided || tensor.is_nested()) {
      result[i] = py::none();
      continue;
    }
    result[i] = py::make_tuple(dtype_of(tensor), shape_of(tensor), tuple_of(tensor.strides()),
                               byte_offset(tensor), nbytes_of(tensor), storage_nbytes_of(tensor));
  }
  return result;
}

}  // namespace

void bind_listing(py::module_& module) {
  module.def("tensor_facts", &tensor_facts, py::arg("tensors"));
}

}  // namespace ptsave
