// The storages that a pickle refers to by persistent ids.  Needs the GIL.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pickle/common/object.h"
#include "pickle/in/torch_machine.h"
#include "pickle/in/unpickler.h"

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

}  // namespace ptsave
