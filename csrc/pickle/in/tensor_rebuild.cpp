#include "pickle/in/tensor_rebuild.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "pickle/common/attribute.h"
#include "tensors/storage.h"

namespace ptsave {
namespace {

std::optional<std::int64_t> natural_number(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;  // torch accepts True only in some places
  int overflow = 0;
  const long long n = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0 || n < 0) return std::nullopt;
  return n;
}

bool read_counts(PyObject* sequence, Dimensions& counts) {
  if (!PyTuple_Check(sequence) && !PyList_Check(sequence)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    const std::optional<std::int64_t> count = natural_number(PySequence_Fast_GET_ITEM(sequence, i));
    if (!count) return false;
    counts.push_back(*count);
  }
  return true;
}

// Reads a geometry; nothing if a number is missing, negative or too large.
std::optional<Geometry> geometry_of(PyObject* offset, PyObject* sizes, PyObject* strides) {
  Geometry geometry;
  const std::optional<std::int64_t> start = natural_number(offset);
  if (!start || !read_counts(sizes, geometry.sizes) || !read_counts(strides, geometry.strides) ||
      geometry.sizes.size() != geometry.strides.size()) {
    return std::nullopt;
  }
  geometry.offset = *start;
  return geometry;
}

// Whether all elements lie within a storage of `nbytes`, without overflow.
bool fits(const Geometry& geometry, c10::ScalarType dtype, std::size_t nbytes) {
  std::int64_t numel = 1;
  std::int64_t end = 0;  // the last element's position, relative to the first
  bool overflows = false;
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i) {
    const std::int64_t size = geometry.sizes[i];
    std::int64_t step = 0;
    overflows |= __builtin_mul_overflow(numel, size, &numel);
    overflows |= __builtin_mul_overflow(size - 1, geometry.strides[i], &step);
    overflows |= __builtin_add_overflow(end, step, &end);
  }
  end /= elements_per_byte(dtype);  // torch packs them without gaps, but counts the offset in bytes
  overflows |= __builtin_add_overflow(end, geometry.offset, &end);
  if (overflows) return false;
  return numel == 0 || static_cast<std::uint64_t>(end) < nbytes / c10::elementSize(dtype);
}

// Types whose tensors torch.empty() makes without a quantizer and without a warning.
bool is_plain_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
    case c10::ScalarType::Bool:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
    case c10::ScalarType::Float8_e5m2:
    case c10::ScalarType::Float8_e4m3fn:
    case c10::ScalarType::Float8_e5m2fnuz:
    case c10::ScalarType::Float8_e4m3fnuz:
    case c10::ScalarType::Float8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

bool can_require_grad(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

// Whether a tensor is made without side effects: no mode, no inference tensor.
bool nothing_intervenes() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return keys.included_ == c10::default_included_set &&
         keys.excluded_ == c10::default_excluded_set &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0;
}

// Makes a tensor by torch's own steps, because external backends may have their own tensor types.
at::Tensor make_tensor_of_backend(const PlainTensor& plain) {
  const auto options = at::TensorOptions(plain.dtype).device(plain.storage.device());
  at::Tensor tensor = at::empty({0}, options);
  return tensor.set_(plain.storage, plain.geometry.offset, plain.geometry.sizes,
                     plain.geometry.strides);
}

at::Tensor make_tensor(const PlainTensor& plain) {
  const c10::Device device = plain.storage.device();
  if (!device.is_cpu() && !device.is_cuda()) return make_tensor_of_backend(plain);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(plain.storage),
      c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(plain.dtype));
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const Geometry& geometry = plain.geometry;
  impl->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  impl->bump_version();  // as Tensor.set_() does
  return tensor;
}

// The arguments of torch's three functions that make tensors.
struct TensorArguments {
  std::span<const Value> all;
  Rebuild function;

  bool have_expected_number() const {
    switch (function) {
      case Rebuild::kTensor:
        return all.size() == 4;
      case Rebuild::kTensorV2:
        return all.size() == 6 || (all.size() == 7 && all[6].get() == Py_None);
      default:
        return all.size() == 7 || (all.size() == 8 && all[7].get() == Py_None);
    }
  }
  bool have_flags() const { return function != Rebuild::kTensor; }
  PyObject* requires_grad() const { return all[4].get(); }
  PyObject* hooks() const { return all[5].get(); }
  PyObject* dtype() const { return function == Rebuild::kTensorV3 ? all[6].get() : nullptr; }
};

[[noreturn]] void refuse_quantized() {
  PyErr_SetString(PyExc_RuntimeError,
                  "a quantized tensor's offset, size and stride do not lie within its storage");
  throw PythonError{};
}

bool is_quantized_dtype(PyObject* object) {
  return THPDtype_Check(object) &&
         c10::isQIntType(reinterpret_cast<THPDtype*>(object)->scalar_type);
}

// `arguments` begin with storage, offset, size and stride.
void check_geometry(PyObject* arguments, c10::ScalarType dtype) {
  const Object untyped =
      attribute(Object::borrow(PyTuple_GET_ITEM(arguments, 0)), "_untyped_storage");
  const Object nbytes = call_method(untyped.get(), "nbytes");
  const std::optional<std::int64_t> available = natural_number(nbytes.get());
  const std::optional<Geometry> geometry =
      geometry_of(PyTuple_GET_ITEM(arguments, 1), PyTuple_GET_ITEM(arguments, 2),
                  PyTuple_GET_ITEM(arguments, 3));
  if (!geometry || !available || !fits(*geometry, dtype, static_cast<std::size_t>(*available))) {
    refuse_quantized();
  }
}

// The dtype of the tensor that a function makes; null if the arguments do not show it.
Object dtype_argument(Rebuild function, PyObject* arguments) {
  constexpr Py_ssize_t kDtype = 6;
  if (function == Rebuild::kTensorV3) {
    if (PyTuple_GET_SIZE(arguments) <= kDtype) return {};
    return Object::borrow(PyTuple_GET_ITEM(arguments, kDtype));
  }
  const Object storage = Object::borrow(PyTuple_GET_ITEM(arguments, 0));
  // Refuse a tensor here: it has the attributes that torch expects of a storage.
  if (THPVariable_Check(storage.get())) refuse_quantized();
  if (PyObject_HasAttrString(storage.get(), "_untyped_storage") == 0) return {};
  return attribute(storage, "dtype");
}

}  // namespace

HooksSetter::HooksSetter() : name_(interned("_backward_hooks")) {
  Object found = attribute_or_nothing(THPVariableClass, "_backward_hooks");
  if (!found || Py_TYPE(found.get()) != &PyGetSetDescr_Type) return;
  const auto* descriptor = reinterpret_cast<PyGetSetDescrObject*>(found.get());
  if (descriptor->d_getset->set == nullptr) return;
  direct_ = descriptor->d_getset;
  descriptor_ = std::move(found);
}

void HooksSetter::set(PyObject* tensor, PyObject* hooks) const {
  const bool is_exact = Py_TYPE(tensor) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
  if (direct_ != nullptr && is_exact && Py_TYPE(tensor)->tp_setattro == PyObject_GenericSetAttr) {
    checked(direct_->set(tensor, hooks, direct_->closure));
  } else {
    checked(PyObject_SetAttr(tensor, name_.get(), hooks));
  }
}

TensorRebuilder::TensorRebuilder(const StorageReferences& storages)
    : storages_(storages),
      make_subclass_(attribute(attribute(import_module("torch"), "Tensor"), "_make_subclass")) {}

Object TensorRebuilder::rebuild(const PlainTensor& tensor) const {
  return nothing_intervenes() ? rebuild_checked(tensor) : Object();
}

Object TensorRebuilder::rebuild(Rebuild function, std::span<const Value> arguments) const {
  if (!nothing_intervenes()) return {};
  switch (function) {
    case Rebuild::kTensor:
    case Rebuild::kTensorV2:
    case Rebuild::kTensorV3:
      return rebuild_tensor(function, arguments);
    case Rebuild::kParameter:
      return rebuild_parameter(arguments);
    default:
      return {};
  }
}

Object TensorRebuilder::rebuild_tensor(Rebuild function, std::span<const Value> arguments) const {
  const TensorArguments given{arguments, function};
  if (arguments.empty() || !arguments[0].is_storage()) return {};
  for (const Value& argument : arguments.subspan(1)) {
    if (argument.is_storage()) return {};
  }
  if (!given.have_expected_number()) return {};
  const PlainStorage& storage = storages_[arguments[0].storage_index()];
  c10::ScalarType dtype = storage.type->dtype;
  if (PyObject* const explicit_dtype = given.dtype()) {
    if (!THPDtype_Check(explicit_dtype)) return {};
    dtype = reinterpret_cast<THPDtype*>(explicit_dtype)->scalar_type;
  }
  bool requires_grad = false;
  if (given.have_flags()) {
    requires_grad = given.requires_grad() == Py_True;
    if (!requires_grad && given.requires_grad() != Py_False) return {};
    // _rebuild_tensor_v3 sets requires_grad before it fills the tensor.
    if (requires_grad && function == Rebuild::kTensorV3) return {};
    if (!PyODict_CheckExact(given.hooks())) return {};
  }
  const std::optional<Geometry> geometry =
      geometry_of(arguments[1].get(), arguments[2].get(), arguments[3].get());
  if (!geometry) return {};
  return rebuild_checked({.storage = *storage.storage,
                          .dtype = dtype,
                          .geometry = *geometry,
                          .requires_grad = requires_grad,
                          .hooks = given.have_flags() ? given.hooks() : nullptr});
}

Object TensorRebuilder::rebuild_checked(const PlainTensor& plain) const {
  if (!is_plain_dtype(plain.dtype) || (plain.requires_grad && !can_require_grad(plain.dtype)) ||
      !fits(plain.geometry, plain.dtype, plain.storage.nbytes())) {
    return {};
  }
  at::Tensor tensor = make_tensor(plain);
  if (plain.requires_grad) tensor.set_requires_grad(true);
  Object object = Object::checked(THPVariable_Wrap(std::move(tensor)));
  if (plain.hooks != nullptr) hooks_setter_.set(object.get(), plain.hooks);
  return object;
}

Object TensorRebuilder::rebuild_parameter(std::span<const Value> arguments) const {
  if (arguments.size() != 3) return {};
  for (const Value& argument : arguments) {
    if (argument.is_storage()) return {};
  }
  PyObject* const data = arguments[0].get();
  PyObject* const requires_grad = arguments[1].get();
  PyObject* const hooks = arguments[2].get();
  if (!THPVariable_CheckExact(data) || !PyBool_Check(requires_grad) || !PyODict_CheckExact(hooks)) {
    return {};
  }
  PyObject* const parts[] = {ParameterClass, data, requires_grad};
  Object parameter =
      Object::checked(PyObject_Vectorcall(make_subclass_.get(), parts, std::size(parts), nullptr));
  hooks_setter_.set(parameter.get(), hooks);
  return parameter;
}

Object unpacked(PyObject* arguments) {
  Object tuple = Object::steal(PySequence_Tuple(arguments));
  if (!tuple) PyErr_Clear();
  return tuple;
}

void check_quantized(const Globals& globals, Rebuild function, Object arguments) {
  // (function, type, its arguments, state), nested to any depth.
  while (function == Rebuild::kFromType) {
    if (!PyTuple_Check(arguments.get()) || PyTuple_GET_SIZE(arguments.get()) < 3) return;
    function = globals.rebuild_of(PyTuple_GET_ITEM(arguments.get(), 0));
    if (function == Rebuild::kNone) return;
    arguments = unpacked(PyTuple_GET_ITEM(arguments.get(), 2));
    if (!arguments) return;
  }
  if (function == Rebuild::kParameter || PyTuple_GET_SIZE(arguments.get()) < 4) return;
  const Object dtype = dtype_argument(function, arguments.get());
  if (!dtype || !is_quantized_dtype(dtype.get())) return;
  const c10::ScalarType type = reinterpret_cast<THPDtype*>(dtype.get())->scalar_type;
  check_geometry(arguments.get(), type);
}

void check_set_state(PyObject* object) {
  if (THPVariable_Check(object) && THPVariable_Unpack(object).is_quantized()) refuse_quantized();
}

}  // namespace ptsave
