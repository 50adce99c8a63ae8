// Objects of torch and Python for the pickler, and a check that both behave as the pickler assumes.
//
// One instance per process, made at first use and never freed.  Needs the GIL.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <Python.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "pickle/common/object.h"

namespace ptsave {

// Thrown if only Python's pickler can write the object or raise the right error.
struct HandOver {};

inline bool is_true(const Object& object) { return checked(PyObject_IsTrue(object.get())) != 0; }

// Whether a function is the module's own definition of that name, not a replacement.
inline bool is_defined(const Object& owner, const char* name, const Object& module,
                       const char* qualname) {
  const Object function = attribute(owner, name);
  if (!is_function_of(function.get(), module)) return false;
  PyObject* const actual = reinterpret_cast<PyFunctionObject*>(function.get())->func_qualname;
  return PyUnicode_CompareWithASCIIString(actual, qualname) == 0;
}

inline bool are_built_in(PyTypeObject* type, const std::vector<Object>& names) {
  return std::ranges::all_of(names, [&](const Object& name) {
    const Object member = attribute(reinterpret_cast<PyObject*>(type), name);
    return Py_IS_TYPE(member.get(), &PyMethodDescr_Type) ||
           Py_IS_TYPE(member.get(), &PyGetSetDescr_Type);
  });
}

// The members of a tensor that torch.Tensor.__reduce_ex__ and torch.nn.Parameter.__reduce_ex__ use.
// Made once, because interning a name takes longer than looking it up.
inline std::vector<Object> tensor_members(bool has_getstate) {
  std::vector<Object> names;
  for (const char* const name : {"size", "stride", "storage_offset", "device", "dtype", "layout",
                                 "is_quantized", "is_sparse", "is_nested", "is_conj",
                                 "untyped_storage", "requires_grad", "data", "_backward_hooks"}) {
    names.push_back(interned(name));
  }
  if (has_getstate) names.push_back(interned("__getstate__"));
  return names;
}

class PickleEnvironment {
 public:
  static const PickleEnvironment& get() {
    // Not a static object: initializing it would wait for another thread while holding the GIL.
    static const PickleEnvironment* environment = nullptr;
    if (environment == nullptr) {
      const auto* const made = new PickleEnvironment;
      if (environment == nullptr) environment = made;
    }
    return *environment;
  }

  // Whether torch and Python have their default behaviour.  Then no active mode sees calls of a
  // tensor's methods, none of these methods is replaced, and no reducer is registered for a type
  // that the pickler reduces itself.
  bool is_default() const {
    return has_default_modes() && has_default_reducers() && has_default_methods();
  }

  // torch's class for a dtype's typed storages; nothing if the dtype's tensors are saved with an
  // untyped storage.  Throws HandOver if torch cannot save such a tensor.
  std::optional<Object> typed_storage_class(PyObject* dtype) const {
    const auto call = [&](const char* function) {
      return call_method(torch_storage_.get(), function);
    };
    if (checked(PySequence_Contains(call("_new_dtypes").get(), dtype)) != 0) return std::nullopt;
    const Object names = call("_dtype_to_storage_type_map");
    PyObject* const name = item_or_null(names.get(), dtype);
    if (name == nullptr) throw HandOver{};
    return Object::checked(PyObject_GetAttr(torch_.get(), name));
  }

  // The location that torch saves for this storage, such as "cuda:0": the first answer of the
  // packages registered with torch.serialization.  Throws HandOver if it would have to ask a
  // package that is not torch's.
  Object location_of(PyObject* untyped_storage) const {
    const Object registry = attribute(torch_serialization_, "_package_registry");
    const Object packages = Object::checked(PySequence_Tuple(registry.get()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(packages.get()); ++i) {
      const Object tagger =
          Object::checked(PySequence_GetItem(PyTuple_GET_ITEM(packages.get(), i), 1));
      if (!is_torchs_tagger(tagger.get())) throw HandOver{};
      Object location = Object::checked(PyObject_CallOneArg(tagger.get(), untyped_storage));
      if (!is_true(location)) continue;
      if (PyUnicode_CheckExact(location.get()) == 0) throw HandOver{};
      return location;
    }
    throw HandOver{};
  }

  // Look up the current attributes, because users may replace them.
  Object rebuild_function(const char* name) const { return attribute(torch_utils_, name); }
  Object untyped_storage() const { return attribute(torch_, "UntypedStorage"); }

  // A new dict that says whether the tensor is a lazy conjugate or a lazy negation.
  Object tensor_metadata(PyObject* tensor) const {
    const Object function = attribute(attribute(torch_, "_C"), "_get_tensor_metadata");
    Object metadata = Object::checked(PyObject_CallOneArg(function.get(), tensor));
    if (PyDict_CheckExact(metadata.get()) == 0) throw HandOver{};
    return metadata;
  }

  PyTypeObject* typed_storage_type() const { return type(typed_storage_); }
  PyTypeObject* ordered_dict_type() const { return type(ordered_dict_); }
  PyTypeObject* size_type() const { return type(size_); }

  // Whether object.__getstate__ of this object returns a state to save.
  bool has_state(PyObject* object) const {
    if (getstate_) {
      const Object state = Object::checked(PyObject_CallOneArg(getstate_.get(), object));
      return state.get() != Py_None;
    }
    PyObject** const attributes = _PyObject_GetDictPtr(object);
    return attributes != nullptr && *attributes != nullptr && PyDict_Size(*attributes) > 0;
  }

  // ---- objects of Python, fixed when this object is made
  Object module_names;  // Python 2's names by Python 3's names
  Object global_names;  // Python 2's (module, name) pairs by Python 3's
  Object codecs_encode;
  // The same objects as the string constants in the sources of torch and Python.
  Object word_storage;
  Object word_latin1;

 private:
  PickleEnvironment()
      : module_names(attribute(import_module("_compat_pickle"), "REVERSE_IMPORT_MAPPING")),
        global_names(attribute(import_module("_compat_pickle"), "REVERSE_NAME_MAPPING")),
        codecs_encode(attribute(import_module("_codecs"), "encode")),
        word_storage(interned("storage")),
        word_latin1(interned("latin1")),
        torch_(import_module("torch")),
        torch_utils_(import_module("torch._utils")),
        torch_tensor_(import_module("torch._tensor")),
        torch_hooks_(import_module("torch.utils.hooks")),
        torch_parameter_(import_module("torch.nn.parameter")),
        torch_storage_(import_module("torch.storage")),
        torch_serialization_(import_module("torch.serialization")),
        typed_storage_(attribute(torch_storage_, "TypedStorage")),
        size_(attribute(torch_, "Size")),
        ordered_dict_(attribute(import_module("collections"), "OrderedDict")),
        dispatch_table_(attribute(import_module("copyreg"), "dispatch_table")),
        extension_registry_(attribute(import_module("copyreg"), "_extension_registry")),
        pickle_complex_(attribute(import_module("copyreg"), "pickle_complex")),
        getstate_(
            attribute_or_nothing(reinterpret_cast<PyObject*>(&PyBaseObject_Type), "__getstate__")),
        tensor_members_(tensor_members(static_cast<bool>(getstate_))) {}

  static PyTypeObject* type(const Object& object) {
    return reinterpret_cast<PyTypeObject*>(object.get());
  }

  bool has_default_modes() const {
    using c10::DispatchKey;
    constexpr std::array kTransforms = {DispatchKey::FuncTorchDynamicLayerFrontMode,
                                        DispatchKey::Functionalize, DispatchKey::Tracer};
    if (c10::impl::TorchDispatchModeTLS::any_modes_set() || !has_default_function_modes() ||
        std::ranges::any_of(kTransforms, c10::impl::tls_is_dispatch_key_included)) {
      return false;
    }
    const Object tls = attribute(torch_serialization_, "_serialization_tls");
    return !is_true(attribute(tls, "skip_data")) &&
           !is_true(attribute(tls, "materialize_fake_tensors"));
  }

  // A default device is a mode, too, but it only affects new tensors.
  bool has_default_function_modes() const {
    using Modes = at::impl::PythonTorchFunctionTLS;
    const std::int64_t n = Modes::stack_len();
    if (n == 0) return true;
    const Object device_context = attribute(import_module("torch.utils._device"), "DeviceContext");
    for (std::int64_t i = 0; i < n; ++i) {
      PyObject* const mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
      if (!Py_IS_TYPE(mode, type(device_context))) return false;
    }
    return true;
  }

  bool has_default_reducers() const {
    if (PyDict_Size(extension_registry_.get()) != 0) return false;
    const Object storage_class = attribute(torch_, "FloatStorage");
    const std::array types = {reinterpret_cast<PyTypeObject*>(THPVariableClass),
                              reinterpret_cast<PyTypeObject*>(ParameterClass),
                              &THPDtypeType,
                              &THPDeviceType,
                              size_type(),
                              ordered_dict_type(),
                              &PyCFunction_Type,
                              Py_TYPE(storage_class.get())};
    const auto is_registered = [this](PyTypeObject* type) {
      return checked(PyDict_Contains(dispatch_table_.get(), reinterpret_cast<PyObject*>(type))) !=
             0;
    };
    if (std::ranges::any_of(types, is_registered)) return false;
    auto* const complex_type = reinterpret_cast<PyObject*>(&PyComplex_Type);
    return PyDict_GetItemWithError(dispatch_table_.get(), complex_type) == pickle_complex_.get();
  }

  bool has_default_methods() const {
    auto* const tensor = reinterpret_cast<PyTypeObject*>(THPVariableClass);
    auto* const parameter = reinterpret_cast<PyTypeObject*>(ParameterClass);
    const Object tensor_class = Object::borrow(THPVariableClass);
    const Object parameter_class = Object::borrow(ParameterClass);
    return are_built_in(tensor, tensor_members_) && are_built_in(parameter, tensor_members_) &&
           is_defined(tensor_class, "__reduce_ex__", torch_tensor_, "Tensor.__reduce_ex__") &&
           is_defined(tensor_class, "_reduce_ex_internal", torch_tensor_,
                      "Tensor._reduce_ex_internal") &&
           is_defined(tensor_class, "_typed_storage", torch_tensor_, "Tensor._typed_storage") &&
           is_defined(parameter_class, "__reduce_ex__", torch_parameter_,
                      "Parameter.__reduce_ex__") &&
           is_defined(torch_utils_, "_get_obj_state", torch_utils_, "_get_obj_state") &&
           is_defined(torch_utils_, "get_tensor_metadata", torch_utils_, "get_tensor_metadata") &&
           is_defined(torch_hooks_, "warn_if_has_hooks", torch_hooks_, "warn_if_has_hooks");
  }

  bool is_torchs_tagger(PyObject* tagger) const {
    if (is_function_of(tagger, torch_serialization_)) return true;
    const Object partial = attribute(import_module("functools"), "partial");
    return Py_IS_TYPE(tagger, type(partial)) &&
           is_function_of(attribute(Object::borrow(tagger), "func").get(), torch_serialization_);
  }

  Object torch_;
  Object torch_utils_;
  Object torch_tensor_;
  Object torch_hooks_;
  Object torch_parameter_;
  Object torch_storage_;
  Object torch_serialization_;
  Object typed_storage_;
  Object size_;
  Object ordered_dict_;
  Object dispatch_table_;
  Object extension_registry_;
  Object pickle_complex_;
  Object getstate_;  // nothing before Python 3.11
  std::vector<Object> tensor_members_;
};

// Reserves n levels of Python's recursion limit while this object lives, or none if too few are
// left.  Needs the GIL; leaves no exception set.
class RecursionLevels {
 public:
  explicit RecursionLevels(int n) {
    while (n_ < n && Py_EnterRecursiveCall("") == 0) ++n_;
    if (n_ == n) return;
    PyErr_Clear();
    leave();
    too_deep_ = true;
  }
  RecursionLevels(const RecursionLevels&) = delete;
  RecursionLevels& operator=(const RecursionLevels&) = delete;
  ~RecursionLevels() { leave(); }

  bool too_deep() const { return too_deep_; }

 private:
  void leave() {
    for (; n_ > 0; --n_) Py_LeaveRecursiveCall();
  }

  int n_ = 0;
  bool too_deep_ = false;
};

}  // namespace ptsave
