// Pickles tensors, parameters and storages.
//
// Lives for one save.  Not thread-safe; needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/COW.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "pickle/common/object.h"
#include "pickle/out/pickle_environment.h"
#include "pickle/out/pickle_stream.h"
#include "pickle/out/pickler.h"

namespace ptsave {

// The dispatch keys of ordinary tensors.  Any other key (Python, functorch, quantization, sparse
// layouts, ...) may change what a tensor reports about itself.
inline constexpr c10::DispatchKeySet kOrdinaryKeys({
    c10::DispatchKey::CPU,
    c10::DispatchKey::CUDA,
    c10::DispatchKey::XPU,
    c10::DispatchKey::PrivateUse1,
    c10::DispatchKey::Meta,
    c10::DispatchKey::ADInplaceOrView,
    c10::DispatchKey::AutogradCPU,
    c10::DispatchKey::AutogradCUDA,
    c10::DispatchKey::AutogradXPU,
    c10::DispatchKey::AutogradPrivateUse1,
    c10::DispatchKey::AutogradMeta,
    c10::DispatchKey::AutocastCPU,
    c10::DispatchKey::AutocastCUDA,
    c10::DispatchKey::AutocastXPU,
    c10::DispatchKey::AutocastPrivateUse1,
    c10::DispatchKey::Conjugate,
    c10::DispatchKey::Negative,
});

inline bool is_plain_device(c10::Device device) {
  return device.is_cpu() || device.is_cuda() || device.is_xpu() || device.is_privateuseone() ||
         device.is_meta();
}

inline bool has_hooks(PyObject* tensor) {
  PyObject* const hooks = reinterpret_cast<THPVariable*>(tensor)->backward_hooks;
  if (hooks == nullptr || hooks == Py_None) return false;
  // A loaded tensor has an empty dict.
  return PyDict_Check(hooks) == 0 || PyDict_Size(hooks) > 0;
}

// torch.serialization.skip_data and fake tensors store the real data's device in this attribute.
inline bool has_fake_device(PyObject* storage) {
  const Object device = attribute_or_nothing(storage, "_fake_device");
  return device && device.get() != Py_None;
}

inline c10::Storage storage_in(PyObject* untyped_storage) {
  const c10::Storage& storage = THPStorage_Unpack(untyped_storage);
  if (storage.unsafeGetStorageImpl() == nullptr) throw HandOver{};
  return storage;
}

// Older torch has named dimensions, and refuses to save tensors that use them.
template <typename TensorImpl>
bool has_names(const TensorImpl& impl) {
  if constexpr (requires { impl.has_named_tensor_meta(); }) {
    return impl.has_named_tensor_meta();
  } else {
    return false;
  }
}

inline Object wrapped(const c10::Storage& storage) {
  return Object::checked(THPStorage_Wrap(storage));
}

// The first number whose str(number) is always a new object.  Python may share strings of one
// digit, so the user's object may refer to them.
inline constexpr std::uint32_t kFirstFreshKey = 10;

class TensorPickler {
 public:
  // `numbering` may be empty, and must outlive this object.
  TensorPickler(const PickleEnvironment& environment, PickleStream& stream,
                const StorageNumbering& numbering)
      : environment_(environment), stream_(stream), out_(stream.out()), numbering_(numbering) {}

  static bool is_tensor(PyTypeObject* type) {
    return reinterpret_cast<PyObject*>(type) == THPVariableClass;
  }
  static bool is_parameter(PyTypeObject* type) {
    return reinterpret_cast<PyObject*>(type) == ParameterClass;
  }
  bool is_storage(PyTypeObject* type) const {
    return type == THPStorageClass || type == environment_.typed_storage_type();
  }

  // Write an object of exactly this type.  Tensors and parameters must be new to the stream;
  // storages are always written again.  Throw HandOver for an object that is not ordinary.
  void tensor(PyObject* object, Reach reach) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    check_plain(object, tensor);
    if (has_hooks(object)) throw HandOver{};
    reduced_tensor(object, tensor, tensor.requires_grad());
    stream_.put(object, reach);
  }
  void parameter(PyObject* object, Reach reach) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    check_plain(object, tensor);
    function(rebuild_parameter_, "_rebuild_parameter");
    reduced_tensor(object, tensor, /*requires_grad=*/false);
    stream_.put_unreachable();  // parameter.data
    out_.boolean(tensor.requires_grad());
    hooks();
    out_.tuple(3);
    stream_.put_unreachable();
    out_.opcode(opcode::kReduce);
    stream_.put(object, reach);
  }

  void storage(PyObject* object) {
    tensor_ = nullptr;
    if (has_fake_device(object)) throw HandOver{};
    if (Py_IS_TYPE(object, THPStorageClass)) return untyped_storage(storage_in(object));
    const Object untyped = attribute(object, "_untyped_storage");
    const Object dtype = attribute(object, "dtype");
    if (!Py_IS_TYPE(untyped.get(), THPStorageClass) || !THPDtype_Check(dtype.get())) {
      throw HandOver{};
    }
    const c10::ScalarType scalar_type = reinterpret_cast<THPDtype*>(dtype.get())->scalar_type;
    StoredDtype& stored = stored_dtype(scalar_type);
    if (!stored.storage_class || c10::isQIntType(scalar_type)) throw HandOver{};
    reference(storage_in(untyped.get()), *stored.storage_class, scalar_type);
  }

  // The storages in the order of their keys.  Throws HandOver if torch refuses them.
  std::vector<c10::Storage> take_storages() {
    if (has_several_dtypes_) check_dtypes();
    return std::move(storages_);
  }

 private:
  struct StoredDtype {
    Recurring dtype;
    std::optional<Recurring> storage_class;  // if tensors of this dtype have typed storages
  };
  // The key of a storage that may be referred to again.
  struct StorageKey {
    std::uint32_t number;   // the key's number in the memo
    c10::ScalarType dtype;  // the first reference's
  };
  struct Location {
    c10::Device device;
    Recurring text;
    bool is_constant;  // else torch makes a new str each time
  };

  void check_plain(PyObject* object, const at::Tensor& tensor) const {
    if (!tensor.defined()) throw HandOver{};
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    const bool has_ordinary_keys =
        (impl.key_set().raw_repr() & ~kOrdinaryKeys.raw_repr()) == 0 && !impl.key_set().empty();
    if (!has_ordinary_keys || tensor.layout() != c10::kStrided ||
        !is_plain_device(tensor.device()) || impl.has_symbolic_sizes_strides() || has_names(impl) ||
        environment_.has_state(object)) {
      throw HandOver{};
    }
  }

  void reduced_tensor(PyObject* object, const at::Tensor& tensor, bool requires_grad) {
    if (tensor.is_meta()) return reduced_meta_tensor(tensor, requires_grad);
    if (!tensor.has_storage()) throw HandOver{};
    const c10::Storage& storage = tensor.storage();
    tensor_ = &tensor;
    StoredDtype& stored = stored_dtype(tensor.scalar_type());
    if (stored.storage_class) {
      function(rebuild_tensor_v2_, "_rebuild_tensor_v2");
      out_.opcode(opcode::kMark);
      reference(storage, *stored.storage_class, tensor.scalar_type());
    } else {
      if (has_fake_device(wrapped(storage).get())) throw HandOver{};
      function(rebuild_tensor_v3_, "_rebuild_tensor_v3");
      out_.opcode(opcode::kMark);
      untyped_storage(storage);
    }
    out_.integer(tensor.storage_offset());
    integers(tensor.sizes());
    integers(tensor.strides());
    out_.boolean(requires_grad);
    hooks();
    if (!stored.storage_class) stream_.reduced_to_name(stored.dtype);
    const bool may_have_metadata = tensor.is_conj() || tensor.is_neg() || tensor.is_privateuseone();
    if (may_have_metadata) metadata(object);
    out_.opcode(opcode::kTuple);
    stream_.put_unreachable();
    out_.opcode(opcode::kReduce);
  }

  void reduced_meta_tensor(const at::Tensor& tensor, bool requires_grad) {
    function(rebuild_meta_tensor_, "_rebuild_meta_tensor_no_storage");
    out_.opcode(opcode::kMark);
    stream_.reduced_to_name(stored_dtype(tensor.scalar_type()).dtype);
    integers(tensor.sizes());
    integers(tensor.strides());
    out_.boolean(requires_grad);
    out_.opcode(opcode::kTuple);
    stream_.put_unreachable();
    out_.opcode(opcode::kReduce);
  }

  void integers(c10::IntArrayRef values) {
    if (values.empty()) return out_.opcode(opcode::kEmptyTuple);
    if (values.size() > 3) out_.opcode(opcode::kMark);
    for (const std::int64_t value : values) out_.integer(value);
    out_.tuple(values.size());
    stream_.put_unreachable();
  }
  // Writes an empty OrderedDict, because hooks are never saved.
  void hooks() {
    stream_.new_ordered_dict();
    stream_.put_unreachable();
  }
  // Writes the metadata's dict, which is new for each tensor, like its keys.
  void metadata(PyObject* object) {
    const Object dict = environment_.tensor_metadata(object);
    const Py_ssize_t size = PyDict_Size(dict.get());
    if (size == 0) return;
    if (size < 0 || size > 2) throw HandOver{};
    out_.opcode(opcode::kEmptyDict);
    stream_.put_unreachable();
    if (size > 1) out_.opcode(opcode::kMark);
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(dict.get(), &position, &key, &value) != 0) {
      if (PyUnicode_CheckExact(key) == 0 || PyBool_Check(value) == 0) throw HandOver{};
      stream_.characters(key);
      stream_.put_unreachable();
      out_.boolean(value == Py_True);
    }
    out_.opcode(size > 1 ? opcode::kSetItems : opcode::kSetItem);
  }

  void function(std::optional<Recurring>& function, const char* name) {
    if (!function) function = Recurring{environment_.rebuild_function(name)};
    stream_.global(*function);
  }
  StoredDtype& stored_dtype(c10::ScalarType dtype) {
    std::optional<StoredDtype>& stored = dtypes_.at(static_cast<std::size_t>(dtype));
    if (!stored) {
      auto* const object = reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
      StoredDtype made{.dtype = {Object::borrow(object)}, .storage_class = std::nullopt};
      if (std::optional<Object> storage_class = environment_.typed_storage_class(object)) {
        made.storage_class = Recurring{std::move(*storage_class)};
      }
      stored = std::move(made);
    }
    return *stored;
  }

  void untyped_storage(const c10::Storage& storage) {
    if (!untyped_storage_class_) untyped_storage_class_ = Recurring{environment_.untyped_storage()};
    reference(storage, *untyped_storage_class_, c10::kByte);
  }
  // ("storage", class, key, location, number of elements)
  void reference(const c10::Storage& storage, Recurring& storage_class, c10::ScalarType dtype) {
    out_.opcode(opcode::kMark);
    stream_.text(word_storage_);
    stream_.global(storage_class);
    key(storage, dtype);
    location(storage);
    out_.integer(static_cast<std::int64_t>(storage.nbytes() / c10::elementSize(dtype)));
    out_.opcode(opcode::kTuple);
    stream_.put_unreachable();
    out_.opcode(opcode::kBinPersId);
  }

  void key(const c10::Storage& storage, c10::ScalarType dtype) {
    if (storage.use_count() == 1) {  // only one tensor uses it
      key_text(number(storage, dtype));
      return;
    }
    const auto next = static_cast<std::uint32_t>(keys_.size());
    const std::uint32_t known = keys_by_storage_.find_or_add(storage.unsafeGetStorageImpl(), next);
    if (known < next) {
      const bool has_address = storage.data() != nullptr && !storage.device().is_meta();
      if (keys_[known].dtype != dtype && has_address) throw HandOver{};  // torch refuses it
      return out_.get(keys_[known].number);
    }
    keys_.push_back({key_text(number(storage, dtype)), dtype});
  }

  // Adds a new storage, and returns its record's number.
  std::uint32_t number(const c10::Storage& storage, c10::ScalarType dtype) {
    const auto index = static_cast<std::uint32_t>(storages_.size());
    note_dtype(storage, dtype);
    return numbering_ ? numbering_(storage, tensor_, dtype) : index;
  }
  // Writes a new key; returns its number in the memo.
  std::uint32_t key_text(std::uint32_t number) {
    if (number >= kFirstFreshKey) {
      std::array<char, std::numeric_limits<std::uint32_t>::digits10 + 1> digits{};
      const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
      out_.text({digits.data(), static_cast<std::size_t>(end - digits.data())});
      return stream_.put_unreachable();
    }
    const Object digit = Object::checked(PyLong_FromUnsignedLong(number));
    Recurring text{Object::checked(PyObject_Str(digit.get()))};
    stream_.text(text);
    return *text.number;
  }

  void note_dtype(const c10::Storage& storage, c10::ScalarType dtype) {
    // Asking a lazy copy for its address would turn it into a real copy.
    if (c10::impl::cow::is_cow_data_ptr(storage.data_ptr())) throw HandOver{};
    const bool has_memory = storage.mutable_data() != nullptr || storage.nbytes() == 0;
    if (!has_memory && !storage.device().is_meta()) throw HandOver{};  // torch refuses it
    has_several_dtypes_ |= !storage_dtypes_.empty() && storage_dtypes_.back() != dtype;
    storages_.push_back(storage);
    storage_dtypes_.push_back(dtype);
  }
  // torch records one dtype for each address, so views with other dtypes cannot be saved, even from
  // separate storages.
  void check_dtypes() const {
    AddressTable dtypes_by_address(storages_.size());
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      const void* const address = storages_[i].data();
      if (address == nullptr || storages_[i].device().is_meta()) continue;
      const auto dtype = static_cast<std::uint32_t>(storage_dtypes_[i]);
      if (dtypes_by_address.find_or_add(address, dtype) != dtype) throw HandOver{};
    }
  }
  void location(const c10::Storage& storage) {
    Location& location = location_of(storage);
    if (location.is_constant) return stream_.text(location.text);
    stream_.characters(location.text.object.get());
    stream_.put_unreachable();
  }
  Location& location_of(const c10::Storage& storage) {
    const c10::Device device = storage.device();
    for (Location& location : locations_) {
      if (location.device == device) return location;
    }
    if (!is_plain_device(device)) throw HandOver{};
    const Object wrapper = wrapped(storage);
    Object text = environment_.location_of(wrapper.get());
    const bool is_constant = environment_.location_of(wrapper.get()).get() == text.get();
    locations_.push_back({.device = device, .text = {std::move(text)}, .is_constant = is_constant});
    return locations_.back();
  }

  const PickleEnvironment& environment_;
  PickleStream& stream_;
  PickleWriter& out_;
  const StorageNumbering& numbering_;
  const at::Tensor* tensor_ = nullptr;  // the tensor whose storage is being written

  std::vector<c10::Storage> storages_;
  std::vector<c10::ScalarType> storage_dtypes_;  // of storages_
  bool has_several_dtypes_ = false;
  std::vector<StorageKey> keys_;
  AddressTable keys_by_storage_;  // StorageImpl -> index into keys_
  std::vector<Location> locations_;
  std::array<std::optional<StoredDtype>, c10::NumScalarTypes> dtypes_;
  std::optional<Recurring> rebuild_tensor_v2_;
  std::optional<Recurring> rebuild_tensor_v3_;
  std::optional<Recurring> rebuild_meta_tensor_;
  std::optional<Recurring> rebuild_parameter_;
  std::optional<Recurring> untyped_storage_class_;
  Recurring word_storage_{environment_.word_storage};
};

}  // namespace ptsave
