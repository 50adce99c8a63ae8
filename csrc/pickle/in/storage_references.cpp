#include "pickle/in/storage_references.h"

#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <utility>

#include "pickle/common/attribute.h"

namespace ptsave {
namespace {

constexpr std::size_t kMaxGap = 1024;  // between the numbers of storages
constexpr std::size_t kIdSize = 5;     // ("storage", storage type, key, location, numel)

std::optional<std::string_view> text_of(PyObject* object) {
  if (!PyUnicode_CheckExact(object)) return std::nullopt;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) {  // lone surrogates
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view(text, static_cast<std::size_t>(size));
}

// The number in a key, if the key is written as torch writes it.
std::optional<std::uint32_t> number_of(std::string_view key) {
  if (key.empty() || (key.front() == '0' && key.size() > 1)) return std::nullopt;
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(key.begin(), key.end(), number);
  if (error != std::errc() || end != key.end()) return std::nullopt;
  return number;
}

std::optional<std::int64_t> count_of(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const long long n = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) return std::nullopt;
  return n;
}

}  // namespace

StorageReferences::StorageReferences(StorageSource* source, const TorchMachine& torch)
    : source_(source),
      torch_(torch),
      storage_type_(attribute(import_module("torch.serialization"), "StorageType")),
      untyped_storage_(attribute(import_module("torch"), "UntypedStorage")) {}

std::optional<std::size_t> StorageReferences::find(std::span<PyObject* const> id) {
  if (source_ == nullptr || id.size() != kIdSize) return std::nullopt;
  const std::optional<std::string_view> key = text_of(id[2]);
  const std::optional<std::string_view> location = text_of(id[3]);
  if (!key || !location) return std::nullopt;
  return find(id[0], id[1], *key, *location, count_of(id[4]));
}

std::optional<std::size_t> StorageReferences::find(PyObject* word, PyObject* storage_type,
                                                   std::string_view key, std::string_view location,
                                                   std::optional<std::int64_t> numel) {
  if (source_ == nullptr || !says_storage(word)) return std::nullopt;
  const StorageType* const type = known_type(storage_type);
  if (type == nullptr) return std::nullopt;
  std::uint32_t& state = state_of(key);
  if (state >= kFirst) return state - kFirst;
  if (state == kLeftToTorch || !numel) return std::nullopt;
  return add(state, *type, key, location, *numel);
}

std::optional<EmptyStorage> StorageReferences::make_empty(PyObject* word, PyObject* storage_type,
                                                          std::string_view key,
                                                          std::string_view location) {
  if (source_ == nullptr || !says_storage(word)) return std::nullopt;
  const StorageType* const type = known_type(storage_type);
  if (type == nullptr || state_of(key) != kUnseen) return std::nullopt;
  const c10::Storage* const storage = source_->storage_of(key, 0, location);
  if (storage == nullptr) return std::nullopt;
  return EmptyStorage{.storage = *storage, .type = type};
}

// Adds a storage at its first reference.
std::optional<std::size_t> StorageReferences::add(std::uint32_t& state, const StorageType& type,
                                                  std::string_view key, std::string_view location,
                                                  std::int64_t numel) {
  // Each reference to an empty storage makes a new one, because torch does not record it as loaded.
  // So it cannot have one number.
  if (numel <= 0) return std::nullopt;
  std::uint64_t nbytes = 0;
  if (__builtin_mul_overflow(static_cast<std::uint64_t>(numel), c10::elementSize(type.dtype),
                             &nbytes)) {
    return std::nullopt;
  }
  const c10::Storage* const storage = source_->storage_of(key, nbytes, location);
  if (storage == nullptr || storages_.size() > std::numeric_limits<std::uint32_t>::max() - kFirst) {
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
const std::string& StorageReferences::kept_location(std::string_view location) {
  const auto known = std::ranges::find(locations_, location);
  return known != locations_.end() ? *known : locations_.emplace_back(location);
}

Object StorageReferences::as_object(std::size_t index) {
  PlainStorage& storage = storages_[index];
  if (!storage.typed) {
    const Object key = Object::checked(PyUnicode_FromStringAndSize(
        storage.key.data(), static_cast<Py_ssize_t>(storage.key.size())));
    const Object numel = Object::checked(
        PyLong_FromSize_t(storage.storage->nbytes() / c10::elementSize(storage.type->dtype)));
    const Object location = Object::checked(PyUnicode_FromStringAndSize(
        storage.location->data(), static_cast<Py_ssize_t>(storage.location->size())));
    const Object id =
        Object::checked(PyTuple_Pack(kIdSize, storage_word_.get(), storage.type->object.get(),
                                     key.get(), location.get(), numel.get()));
    storage.typed = torch_.load_persistent(id.get());
  }
  return storage.typed;
}

void StorageReferences::leave_to_torch(PyObject* id) {
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

bool StorageReferences::is_well_formed(PyObject* id) const {
  if (!PyTuple_CheckExact(id) || PyTuple_GET_SIZE(id) != static_cast<Py_ssize_t>(kIdSize)) {
    return false;
  }
  const auto part = [id](Py_ssize_t i) { return PyTuple_GET_ITEM(id, i); };
  return PyUnicode_CheckExact(part(0)) && is_storage_type(part(1)) &&
         PyUnicode_CheckExact(part(2)) && PyUnicode_CheckExact(part(3)) &&
         PyLong_CheckExact(part(4));
}

std::uint32_t& StorageReferences::state_of(std::string_view key) {
  // Keys mostly come in order.  A number far ahead must not take memory up to there, and each key's
  // state must be in one place only.
  const std::optional<std::uint32_t> number = number_of(key);
  if (number && *number < states_.size()) return states_[*number];
  if (!number || *number > states_.size() + kMaxGap || !other_states_.empty()) {
    return other_states_[std::string(key)];
  }
  states_.resize(std::size_t{*number} + 1, kUnseen);
  return states_[*number];
}

const StorageType* StorageReferences::known_type(PyObject* object) {
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

bool StorageReferences::is_storage_type(PyObject* object) const {
  return object == untyped_storage_.get() ||
         Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(storage_type_.get());
}

bool StorageReferences::says_storage(PyObject* object) {
  if (object == storage_word_.get()) return true;
  if (text_of(object) != "storage") return false;
  storage_word_ = Object::borrow(object);
  return true;
}

}  // namespace ptsave
