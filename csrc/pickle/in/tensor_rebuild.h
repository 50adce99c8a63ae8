// Makes the storages and tensors of a pickle without torch's functions, if the result is the same.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <Python.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pickle/common/dtypes.h"
#include "pickle/common/object.h"
#include "pickle/common/opcodes.h"
#include "pickle/in/torch_machine.h"
#include "pickle/in/unpickler.h"
#include "pickle/in/values.h"
#include "tensors/dtypes.h"

namespace ptsave {

struct StorageType {
  Object object;  // torch.FloatStorage, ...
  c10::ScalarType dtype;
};

// A storage that has no Python object yet.
struct PlainStorage {
  const c10::Storage* storage;  // the source's
  const StorageType* type;      // of the first reference
  std::string key;
  const std::string* location;  // of the first reference
  Object typed;                 // the result of torch's persistent_load, if it was needed
};

// A storage of 0 bytes with a single reference.
struct EmptyStorage {
  c10::Storage storage;
  const StorageType* type;
};

inline constexpr std::size_t kMaxGap = 1024;  // between the numbers of storages
inline constexpr std::size_t kIdSize = 5;     // ("storage", storage type, key, location, numel)

// The number in a key, if the key is written as torch writes it.
inline std::optional<std::uint32_t> number_of(std::string_view key) {
  if (key.empty() || (key.front() == '0' && key.size() > 1)) return std::nullopt;
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(key.begin(), key.end(), number);
  if (error != std::errc() || end != key.end()) return std::nullopt;
  return number;
}

// The storages that a pickle refers to by persistent ids.  Needs the GIL.
//
// torch keeps one storage for each key, and the first reference decides its type.  So either all of
// a key's references are resolved here, or all by torch's persistent_load.
class StorageReferences {
 public:
  // If `source` is null, torch resolves everything.
  StorageReferences(StorageSource* source, const TorchMachine& torch)
      : source_(source),
        torch_(torch),
        storage_type_(attribute(import_module("torch.serialization"), "StorageType")),
        untyped_storage_(attribute(import_module("torch"), "UntypedStorage")) {}

  // The storage's number for an ordinary id: ("storage", a storage type, key, a location that the
  // source knows, numel).  Nothing if torch's persistent_load must resolve the id.
  std::optional<std::size_t> find(std::span<PyObject* const> id) {
    if (source_ == nullptr || id.size() != kIdSize) return std::nullopt;
    const std::optional<std::string_view> key = text_of(id[2]);
    const std::optional<std::string_view> location = text_of(id[3]);
    if (!key || !location) return std::nullopt;
    return find(id[0], id[1], *key, *location, count_of(id[4]));
  }
  // The same for an id given by its parts.  Only the first reference's `numel` matters.
  std::optional<std::size_t> find(PyObject* word, PyObject* storage_type, std::string_view key,
                                  std::string_view location, std::optional<std::int64_t> numel) {
    if (source_ == nullptr || !says_storage(word)) return std::nullopt;
    const StorageType* const type = known_type(storage_type);
    if (type == nullptr) return std::nullopt;
    std::uint32_t& state = state_of(key);
    if (state >= kFirst) return state - kFirst;
    if (state == kLeftToTorch || !numel) return std::nullopt;
    return add(state, *type, key, location, *numel);
  }

  // A new storage for the parts of an id with numel 0, because torch makes a new empty storage at
  // each reference.  Nothing if torch's persistent_load must resolve the id.
  std::optional<EmptyStorage> make_empty(PyObject* word, PyObject* storage_type,
                                         std::string_view key, std::string_view location) {
    if (source_ == nullptr || !says_storage(word)) return std::nullopt;
    const StorageType* const type = known_type(storage_type);
    if (type == nullptr || state_of(key) != kUnseen) return std::nullopt;
    const c10::Storage* const storage = source_->storage_of(key, 0, location);
    if (storage == nullptr) return std::nullopt;
    return EmptyStorage{.storage = *storage, .type = type};
  }

  const PlainStorage& operator[](std::size_t index) const { return storages_[index]; }

  // The storage's object from torch's persistent_load, which is called once for each storage.
  Object as_object(std::size_t index) {
    PlainStorage& storage = storages_[index];
    if (!storage.typed) {
      const Object key = new_text(storage.key);
      const Object numel = Object::checked(
          PyLong_FromSize_t(storage.storage->nbytes() / c10::elementSize(storage.type->dtype)));
      const Object location = new_text(*storage.location);
      const Object id =
          Object::checked(PyTuple_Pack(kIdSize, storage_word_.get(), storage.type->object.get(),
                                       key.get(), location.get(), numel.get()));
      storage.typed = torch_.load_persistent(id.get());
    }
    return storage.typed;
  }

  // Must be called before torch's persistent_load is called with this id.
  void leave_to_torch(PyObject* id) {
    if (source_ == nullptr || !PyTuple_CheckExact(id) || PyTuple_GET_SIZE(id) < 3) return;
    const std::optional<std::string_view> key = text_of(PyTuple_GET_ITEM(id, 2));
    if (!key) return;
    std::uint32_t& state = state_of(*key);
    if (state >= kFirst) {
      as_object(state - kFirst);  // torch must see the first reference
    } else {
      state = kLeftToTorch;
    }
  }

  // Whether an id has the types that torch's persistent_load assumes.
  bool is_well_formed(PyObject* id) const {
    if (!PyTuple_CheckExact(id) || PyTuple_GET_SIZE(id) != static_cast<Py_ssize_t>(kIdSize)) {
      return false;
    }
    const auto part = [id](Py_ssize_t i) { return PyTuple_GET_ITEM(id, i); };
    return PyUnicode_CheckExact(part(0)) && is_storage_type(part(1)) &&
           PyUnicode_CheckExact(part(2)) && PyUnicode_CheckExact(part(3)) &&
           PyLong_CheckExact(part(4));
  }

 private:
  static constexpr std::uint32_t kUnseen = 0;
  static constexpr std::uint32_t kLeftToTorch = 1;
  static constexpr std::uint32_t kFirst = 2;  // storage i is kFirst + i

  // The state of a key: unseen, left to torch, or the number of a storage.
  std::uint32_t& state_of(std::string_view key) {
    // Keys mostly come in order.  A number far ahead must not take memory up to there, and each
    // key's state must be in one place only.
    const std::optional<std::uint32_t> number = number_of(key);
    if (number && *number < states_.size()) return states_[*number];
    if (!number || *number > states_.size() + kMaxGap || !other_states_.empty()) {
      return other_states_[std::string(key)];
    }
    states_.resize(std::size_t{*number} + 1, kUnseen);
    return states_[*number];
  }

  // Null if the object is not a storage type.
  const StorageType* known_type(PyObject* object) {
    for (const StorageType& type : types_) {
      if (type.object.get() == object) return &type;
    }
    if (!is_storage_type(object)) return nullptr;
    c10::ScalarType dtype = c10::ScalarType::Byte;
    if (object != untyped_storage_.get()) {
      const Object found = Object::checked(PyObject_GetAttrString(object, "dtype"));
      if (!THPDtype_Check(found.get())) return nullptr;
      dtype = reinterpret_cast<THPDtype*>(found.get())->scalar_type;
    }
    types_.push_back({.object = Object::borrow(object), .dtype = dtype});
    return &types_.back();
  }

  // Adds a storage at its first reference.
  std::optional<std::size_t> add(std::uint32_t& state, const StorageType& type,
                                 std::string_view key, std::string_view location,
                                 std::int64_t numel) {
    // Each reference to an empty storage makes a new one, because torch does not record it as
    // loaded. So it cannot have one number.
    if (numel <= 0) return std::nullopt;
    std::uint64_t nbytes = 0;
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(numel), c10::elementSize(type.dtype),
                               &nbytes)) {
      return std::nullopt;
    }
    const c10::Storage* const storage = source_->storage_of(key, nbytes, location);
    if (storage == nullptr ||
        storages_.size() > std::numeric_limits<std::uint32_t>::max() - kFirst) {
      return std::nullopt;
    }
    state = kFirst + static_cast<std::uint32_t>(storages_.size());
    storages_.push_back({.storage = storage,
                         .type = &type,
                         .key = std::string(key),
                         .location = &kept_location(location),
                         .typed = Object()});
    return storages_.size() - 1;
  }

  // A linear search is enough: there are few locations.
  const std::string& kept_location(std::string_view location) {
    const auto known = std::ranges::find(locations_, location);
    return known != locations_.end() ? *known : locations_.emplace_back(location);
  }
  bool is_storage_type(PyObject* object) const {
    return object == untyped_storage_.get() ||
           Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(storage_type_.get());
  }
  bool says_storage(PyObject* object) {
    if (object == storage_word_.get()) return true;
    if (text_of(object) != "storage") return false;
    storage_word_ = Object::borrow(object);
    return true;
  }

  StorageSource* source_;
  const TorchMachine& torch_;
  Object storage_type_;     // torch.serialization.StorageType
  Object untyped_storage_;  // torch.UntypedStorage
  std::deque<StorageType> types_;
  Object storage_word_;  // the last str "storage": usually always the same object
  std::deque<std::string> locations_;
  std::deque<PlainStorage> storages_;
  std::vector<std::uint32_t> states_;  // of keys "0", "1", ... as torch numbers storages
  std::unordered_map<std::string, std::uint32_t> other_states_;
};

using Dimensions = c10::SmallVector<std::int64_t, 5>;

// Offset, sizes and strides of a tensor in its storage, none negative.
struct Geometry {
  std::int64_t offset = 0;
  Dimensions sizes;
  Dimensions strides;
};

// A tensor that consists only of storage, dtype, geometry, requires_grad and hooks.
struct PlainTensor {
  const c10::Storage& storage;
  c10::ScalarType dtype;
  const Geometry& geometry;
  bool requires_grad = false;
  PyObject* hooks = nullptr;  // a collections.OrderedDict, or null for none
};

inline bool read_counts(PyObject* sequence, Dimensions& counts) {
  if (!PyTuple_Check(sequence) && !PyList_Check(sequence)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    const std::optional<std::int64_t> count = natural_number(PySequence_Fast_GET_ITEM(sequence, i));
    if (!count) return false;
    counts.push_back(*count);
  }
  return true;
}

// Reads a geometry; nothing if a number is missing, negative or too large.
inline std::optional<Geometry> geometry_of(PyObject* offset, PyObject* sizes, PyObject* strides) {
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
inline bool fits(const Geometry& geometry, c10::ScalarType dtype, std::size_t nbytes) {
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

// Whether making a tensor has no side effects: no mode is active, not even inference mode.
inline bool nothing_intervenes() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return keys.included_ == c10::default_included_set &&
         keys.excluded_ == c10::default_excluded_set &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0;
}

// Makes a tensor by torch's own steps, because external backends may have their own tensor types.
inline at::Tensor make_tensor_of_backend(const PlainTensor& plain) {
  const auto options = at::TensorOptions(plain.dtype).device(plain.storage.device());
  at::Tensor tensor = at::empty({0}, options);
  return tensor.set_(plain.storage, plain.geometry.offset, plain.geometry.sizes,
                     plain.geometry.strides);
}

inline at::Tensor make_tensor(const PlainTensor& plain) {
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

[[noreturn]] inline void refuse_quantized() {
  fail(PyExc_RuntimeError,
       "a quantized tensor's offset, size and stride do not lie within its storage");
}

inline bool is_quantized_dtype(PyObject* object) {
  return THPDtype_Check(object) &&
         c10::isQIntType(reinterpret_cast<THPDtype*>(object)->scalar_type);
}

// `arguments` begin with storage, offset, size and stride.
inline void check_geometry(PyObject* arguments, c10::ScalarType dtype) {
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
inline Object dtype_argument(Rebuild function, PyObject* arguments) {
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

// Sets the `_backward_hooks` of tensors.  Needs the GIL.
class HooksSetter {
 public:
  HooksSetter() : name_(interned("_backward_hooks")) {
    Object found = attribute_or_nothing(THPVariableClass, "_backward_hooks");
    if (!found || Py_TYPE(found.get()) != &PyGetSetDescr_Type) return;
    const auto* descriptor = reinterpret_cast<PyGetSetDescrObject*>(found.get());
    if (descriptor->d_getset->set == nullptr) return;
    direct_ = descriptor->d_getset;
    descriptor_ = std::move(found);
  }
  void set(PyObject* tensor, PyObject* hooks) const {
    const bool is_exact = Py_TYPE(tensor) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
    if (direct_ != nullptr && is_exact && Py_TYPE(tensor)->tp_setattro == PyObject_GenericSetAttr) {
      checked(direct_->set(tensor, hooks, direct_->closure));
    } else {
      checked(PyObject_SetAttr(tensor, name_.get(), hooks));
    }
  }

 private:
  Object name_;
  // torch.Tensor's own descriptor of that name, or null if it was replaced.  Setting an attribute
  // would look it up for each tensor.
  Object descriptor_;
  PyGetSetDef* direct_ = nullptr;
};

// Rebuilds tensors without calling torch's functions.  Needs the GIL.
class TensorRebuilder {
 public:
  explicit TensorRebuilder(const StorageReferences& storages)
      : storages_(storages),
        make_subclass_(attribute(attribute(import_module("torch"), "Tensor"), "_make_subclass")) {
    const Object torch = import_module("torch");
    for (const PlainDtype& plain : kPlainDtypes) {
      const Object dtype = attribute(torch, plain.name);
      if (!THPDtype_Check(dtype.get())) continue;
      plain_dtypes_.at(
          static_cast<std::size_t>(reinterpret_cast<THPDtype*>(dtype.get())->scalar_type)) = &plain;
    }
  }

  // Returns the object that torch's function would make from the arguments.  Returns nothing if
  // that is not certain; the function itself must then be called.
  Object rebuild(Rebuild function, std::span<const Value> arguments) const {
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

  Object rebuild(const PlainTensor& tensor) const {
    return nothing_intervenes() ? rebuild_checked(tensor) : Object();
  }

 private:
  Object rebuild_tensor(Rebuild function, std::span<const Value> arguments) const {
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

  Object rebuild_checked(const PlainTensor& plain) const {
    const PlainDtype* const dtype = plain_dtypes_.at(static_cast<std::size_t>(plain.dtype));
    if (dtype == nullptr || (plain.requires_grad && !dtype->can_require_grad) ||
        !fits(plain.geometry, plain.dtype, plain.storage.nbytes())) {
      return {};
    }
    at::Tensor tensor = make_tensor(plain);
    if (plain.requires_grad) tensor.set_requires_grad(true);
    Object object = Object::checked(THPVariable_Wrap(std::move(tensor)));
    if (plain.hooks != nullptr) hooks_setter_.set(object.get(), plain.hooks);
    return object;
  }

  Object rebuild_parameter(std::span<const Value> arguments) const {
    if (arguments.size() != 3) return {};
    for (const Value& argument : arguments) {
      if (argument.is_storage()) return {};
    }
    PyObject* const data = arguments[0].get();
    PyObject* const requires_grad = arguments[1].get();
    PyObject* const hooks = arguments[2].get();
    if (!THPVariable_CheckExact(data) || !PyBool_Check(requires_grad) ||
        !PyODict_CheckExact(hooks)) {
      return {};
    }
    PyObject* const parts[] = {ParameterClass, data, requires_grad};
    Object parameter = Object::checked(
        PyObject_Vectorcall(make_subclass_.get(), parts, std::size(parts), nullptr));
    hooks_setter_.set(parameter.get(), hooks);
    return parameter;
  }

  const StorageReferences& storages_;
  Object make_subclass_;  // torch.Tensor._make_subclass
  std::array<const PlainDtype*, c10::NumScalarTypes> plain_dtypes_{};  // null for all others
  HooksSetter hooks_setter_;
};

// Recognizes all opcodes of a plain tensor's arguments at once, because a checkpoint of many small
// tensors consists of little else.
//
// The arguments are read from 26 opcodes, with borrowed objects from the memo.
struct TensorSteps {
  // The persistent id ("storage", type, key, location, numel).
  PyObject* word = nullptr;
  PyObject* storage_type = nullptr;
  std::string_view key;       // a number as torch writes it
  std::string_view location;  // borrowed
  std::int64_t numel = 0;
  // The other arguments of _rebuild_tensor_v2.
  Geometry geometry;
  bool requires_grad = false;
  PyObject* hooks_type = nullptr;  // called without arguments
};

// Reads expected opcodes; every function returns false for any other opcode.
class Recognizer {
 public:
  Recognizer(const PickleCursor& cursor, const Memo& memo) : cursor_(cursor), memo_(memo) {}

  const PickleCursor& cursor() const { return cursor_; }

  bool arguments(TensorSteps& steps) {
    Geometry& geometry = steps.geometry;
    return persistent_id(steps) && count(geometry.offset) && counts(geometry.sizes) &&
           counts(geometry.strides) && flag(steps.requires_grad) && hooks(steps) &&
           opcode(opcode::kTuple) && not_kept() && opcode(opcode::kReduce);
  }

 private:
  bool persistent_id(TensorSteps& steps) {
    return opcode(opcode::kMark) && memoized(steps.word) && memoized(steps.storage_type) &&
           key(steps.key) && location(steps.location) && count(steps.numel) &&
           opcode(opcode::kTuple) && not_kept() && opcode(opcode::kBinPersId);
  }
  bool hooks(TensorSteps& steps) {
    return memoized(steps.hooks_type) && opcode(opcode::kEmptyTuple) && opcode(opcode::kReduce) &&
           not_kept();
  }

  bool opcode(unsigned char expected) {
    if (!next_is(expected)) return false;
    cursor_.byte();
    return true;
  }

  // Reads an object from the memo.
  bool memoized(PyObject*& object) {
    std::uint64_t i = 0;
    const bool is_read = opcode(opcode::kBinGet)
                             ? number<std::uint8_t>(i)
                             : opcode(opcode::kLongBinGet) && number<std::uint32_t>(i);
    if (!is_read) return false;
    const Value* const value = memo_.get(static_cast<std::uint32_t>(i));
    if (value == nullptr || value->is_storage()) return false;
    object = value->get();
    return true;
  }

  // Whether the last object is not memoized, or only in an entry that is never read.
  bool not_kept() { return memo_.skip_put(cursor_); }

  bool count(std::int64_t& value) {
    std::uint64_t read = 0;
    if (opcode(opcode::kBinInt1)) {
      if (!number<std::uint8_t>(read)) return false;
    } else if (opcode(opcode::kBinInt2)) {
      if (!number<std::uint16_t>(read)) return false;
    } else if (!opcode(opcode::kBinInt) || !number<std::uint32_t>(read) || read >> 31 != 0) {
      return false;
    }
    value = static_cast<std::int64_t>(read);
    return true;
  }

  bool counts(Dimensions& values) {
    if (opcode(opcode::kEmptyTuple)) return true;
    const bool marked = opcode(opcode::kMark);
    for (std::int64_t value = 0; count(value);) values.push_back(value);
    const std::size_t n = values.size();
    if (!marked && (n == 0 || n > opcode::kTuples.size())) return false;
    return opcode(marked ? opcode::kTuple : opcode::kTuples[n - 1]) && not_kept();
  }

  // Reads a storage's number, without leading zeros.
  bool key(std::string_view& text) {
    if (!short_text(text) || (text.front() == '0' && text.size() > 1)) return false;
    for (const char c : text) {
      if (c < '0' || c > '9') return false;
    }
    return not_kept();
  }

  // Reads a location: the same str for all storages ("cpu"), or a new str for each ("cuda:0").
  bool location(std::string_view& text) {
    if (!next_is(opcode::kBinUnicode)) return memoized_text(text);
    if (!short_text(text)) return false;
    for (const char c : text) {
      if (c < ' ' || c > '~') return false;
    }
    return not_kept();
  }

  bool flag(bool& value) {
    value = opcode(opcode::kNewTrue);
    return value || opcode(opcode::kNewFalse);
  }

  bool short_text(std::string_view& text) {
    constexpr std::uint64_t kMaxNbytes = 9;
    std::uint64_t nbytes = 0;
    if (!opcode(opcode::kBinUnicode) || !number<std::uint32_t>(nbytes)) return false;
    if (nbytes == 0 || nbytes > kMaxNbytes) return false;
    text = cursor_.take(nbytes);
    return text.size() == nbytes;
  }

  bool memoized_text(std::string_view& text) {
    PyObject* object = nullptr;
    if (!memoized(object)) return false;
    const std::optional<std::string_view> found = text_of(object);
    text = found.value_or(text);
    return found.has_value();
  }

  bool next_is(unsigned char expected) const {
    return !cursor_.at_end() && cursor_.peek() == expected;
  }
  template <class Unsigned>
  bool number(std::uint64_t& value) {
    const std::string_view bytes = cursor_.take(sizeof(Unsigned));
    if (bytes.size() < sizeof(Unsigned)) return false;
    value = little_endian(bytes);
    return true;
  }

  PickleCursor cursor_;
  const Memo& memo_;
};

// The tuple that a call makes from `arguments`; nothing if they are not iterable (the call fails).
inline Object unpacked(PyObject* arguments) {
  Object tuple = Object::steal(PySequence_Tuple(arguments));
  if (!tuple) PyErr_Clear();
  return tuple;
}

// Refuses a quantized tensor that reaches beyond its storage, which torch does not check.
// `function` is not kNone.
inline void check_quantized(const Globals& globals, Rebuild function, Object arguments) {
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

// Refuses to set another storage in a quantized tensor, for the same reason.
inline void check_set_state(PyObject* object) {
  if (THPVariable_Check(object) && THPVariable_Unpack(object).is_quantized()) refuse_quantized();
}

// Takes the steps from behind the arguments' MARK up to REDUCE.  Returns nothing, and has no
// effect, if there are other steps, or if a step would write a memo entry that the pickle reads.
inline std::optional<TensorSteps> take_tensor_steps(PickleCursor& cursor, const Memo& memo) {
  std::optional<TensorSteps> steps(std::in_place);
  Recognizer next(cursor, memo);
  if (!next.arguments(*steps)) return std::nullopt;
  cursor = next.cursor();
  return steps;
}

}  // namespace ptsave
