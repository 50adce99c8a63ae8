// The storages and tensors of a pickle, made without torch's functions where the result is the
// same.
#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pickle/common/object.h"
#include "pickle/common/opcodes.h"
#include "pickle/in/torch_machine.h"
#include "pickle/in/unpickler.h"
#include "pickle/in/values.h"

namespace ptsave {

struct StorageType {
  Object object;  // torch.FloatStorage, ...
  c10::ScalarType dtype;
};

// A storage without a Python object so far.
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

// The storages that a pickle refers to by persistent ids.  Needs the GIL.
//
// torch keeps one storage for each key, and the first reference decides its type.  So either all of
// a key's references are resolved here, or all by torch's persistent_load.
class StorageReferences {
 public:
  // With null `source`, torch resolves everything.
  StorageReferences(StorageSource* source, const TorchMachine& torch);

  // The number of an ordinary id's storage: ("storage", a storage type, key, a location that the
  // source knows, numel).  Nothing if torch's persistent_load must resolve the id.
  std::optional<std::size_t> find(std::span<PyObject* const> id);
  // The same for the parts of an id without object.  Only the first reference's `numel` matters.
  std::optional<std::size_t> find(PyObject* word, PyObject* storage_type, std::string_view key,
                                  std::string_view location, std::optional<std::int64_t> numel);

  // A new storage for the parts of an id with numel 0, because torch makes a new empty storage at
  // each reference.  Nothing if torch's persistent_load must resolve the id.
  std::optional<EmptyStorage> make_empty(PyObject* word, PyObject* storage_type,
                                         std::string_view key, std::string_view location);

  const PlainStorage& operator[](std::size_t index) const { return storages_[index]; }

  // The storage as the object of torch's persistent_load, which is called once for each storage.
  Object as_object(std::size_t index);

  // Must be called before torch's persistent_load is called with this id.
  void leave_to_torch(PyObject* id);

  // Whether an id has the types that torch's persistent_load assumes.
  bool is_well_formed(PyObject* id) const;

 private:
  static constexpr std::uint32_t kUnseen = 0;
  static constexpr std::uint32_t kLeftToTorch = 1;
  static constexpr std::uint32_t kFirst = 2;  // storage i is kFirst + i

  // The state of a key: unseen, left to torch, or the number of a storage.
  std::uint32_t& state_of(std::string_view key);
  // Null if the object is no storage type.
  const StorageType* known_type(PyObject* object);
  std::optional<std::size_t> add(std::uint32_t& state, const StorageType& type,
                                 std::string_view key, std::string_view location,
                                 std::int64_t numel);
  const std::string& kept_location(std::string_view location);
  bool is_storage_type(PyObject* object) const;
  bool says_storage(PyObject* object);

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

// A tensor that consists only of storage, dtype, geometry, flag and hooks.
struct PlainTensor {
  const c10::Storage& storage;
  c10::ScalarType dtype;
  const Geometry& geometry;
  bool requires_grad = false;
  PyObject* hooks = nullptr;  // a collections.OrderedDict, or null for none
};

// Sets the `_backward_hooks` of tensors.  Needs the GIL.
class HooksSetter {
 public:
  HooksSetter();
  void set(PyObject* tensor, PyObject* hooks) const;

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
  explicit TensorRebuilder(const StorageReferences& storages);

  // The object that torch's function makes from the arguments.  Nothing if it is not certain that
  // this is the same object; the function itself must then be called.
  Object rebuild(Rebuild function, std::span<const Value> arguments) const;
  Object rebuild(const PlainTensor& tensor) const;

 private:
  Object rebuild_tensor(Rebuild function, std::span<const Value> arguments) const;
  Object rebuild_checked(const PlainTensor& plain) const;
  Object rebuild_parameter(std::span<const Value> arguments) const;

  const StorageReferences& storages_;
  Object make_subclass_;  // torch.Tensor._make_subclass
  HooksSetter hooks_setter_;
};

// The tuple that a call makes from `arguments`; nothing if they are not iterable (the call fails).
Object unpacked(PyObject* arguments);

// Refuses a quantized tensor that reaches beyond its storage, which torch does not check.
// `function` is not kNone.
void check_quantized(const Globals& globals, Rebuild function, Object arguments);

// Refuses another storage for a quantized tensor, for the same reason.
void check_set_state(PyObject* object);

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

  // Takes the steps from behind the arguments' MARK up to REDUCE.  Nothing, without any effect, if
  // there are other steps, or if one would write a memo entry that the pickle reads.
  static std::optional<TensorSteps> take(PickleCursor& cursor, const Memo& memo);
};

}  // namespace ptsave
