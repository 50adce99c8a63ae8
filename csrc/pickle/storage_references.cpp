#include "pickle/storage_references.h"

#include <torch/csrc/Dtype.h>

#include <charconv>
#include <limits>
#include <utility>

#include "pickle/attribute.h"

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

// The number that torch has given a storage, if this is how it writes it.
std::optional<std::uint32_t> number_of(std::string_view key) {
  if (key.empty() || (key.front() == '0' && key.size() > 1)) return std::nullopt;
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(key.begin(), key.end(), number);
  if (error != std::errc() || end != key.end()) return std::nullopt;
  return number;
}

std::optional<std::uint64_t> nbytes_of(PyObject* numel, c10::ScalarType dtype) {
  if (!PyLong_CheckExact(numel)) return std::nullopt;
  int overflow = 0;
  const long long n = PyLong_AsLongLongAndOverflow(numel, &overflow);
  if (overflow != 0 || n <= 0) return std::nullopt;
  std::uint64_t nbytes = 0;
  if (__builtin_mul_overflow(static_cast<std::uint64_t>(n), c10::elementSize(dtype), &nbytes)) {
    return std::nullopt;
  }
  return nbytes;
}

}  // namespace

StorageReferences::StorageReferences(StorageSource* source, const TorchMachine& torch)
    : source_(source),
      torch_(torch),
      storage_type_(attribute(import_module("torch.serialization"), "StorageType")),
      untyped_storage_(attribute(import_module("torch"), "UntypedStorage")) {}

std::optional<std::size_t> StorageReferences::find(std::span<PyObject* const> id) {
  if (source_ == nullptr || id.size() != kIdSize) return std::nullopt;
  if (!says(id[0], "storage", storage_word_) || !says(id[3], "cpu", cpu_word_)) return std::nullopt;
  const std::optional<std::string_view> key = text_of(id[2]);
  const std::optional<c10::ScalarType> dtype = dtype_of(id[1]);
  if (!key || !dtype) return std::nullopt;
  std::uint32_t& state = state_of(*key);
  if (state >= kFirst) return state - kFirst;
  if (state == kLeftToTorch) return std::nullopt;
  // An empty storage is another one at each reference: torch does not count it as loaded.
  const std::optional<std::uint64_t> nbytes = nbytes_of(id[4], *dtype);
  if (!nbytes) return std::nullopt;
  std::optional<c10::Storage> storage = source_->storage_of(*key, *nbytes);
  if (!storage || storages_.size() > std::numeric_limits<std::uint32_t>::max() - kFirst) {
    return std::nullopt;
  }
  state = kFirst + static_cast<std::uint32_t>(storages_.size());
  storages_.push_back({.storage = std::move(*storage),
                       .dtype = *dtype,
                       .type = Object::borrow(id[1]),
                       .key = Object::borrow(id[2]),
                       .numel = Object::borrow(id[4]),
                       .typed = {}});
  return storages_.size() - 1;
}

Object StorageReferences::as_object(std::size_t index) {
  PlainStorage& storage = storages_[index];
  if (!storage.typed) {
    const Object id =
        Object::checked(PyTuple_Pack(kIdSize, storage_word_.get(), storage.type.get(),
                                     storage.key.get(), cpu_word_.get(), storage.numel.get()));
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
    as_object(state - kFirst);  // torch must know about the first reference
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
  // Keys come mostly in order; a number far ahead must not take memory up to there, nor may its
  // state be looked for in two places.
  const std::optional<std::uint32_t> number = number_of(key);
  if (number && *number < states_.size()) return states_[*number];
  if (!number || *number > states_.size() + kMaxGap || !other_states_.empty()) {
    return other_states_[std::string(key)];
  }
  states_.resize(std::size_t{*number} + 1, kUnseen);
  return states_[*number];
}

std::optional<c10::ScalarType> StorageReferences::dtype_of(PyObject* storage_type) {
  for (const auto& [known, dtype] : dtypes_) {
    if (known.get() == storage_type) return dtype;
  }
  if (!is_storage_type(storage_type)) return std::nullopt;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  if (storage_type != untyped_storage_.get()) {
    const Object object = Object::checked(PyObject_GetAttrString(storage_type, "dtype"));
    if (!THPDtype_Check(object.get())) return std::nullopt;
    dtype = reinterpret_cast<THPDtype*>(object.get())->scalar_type;
  }
  dtypes_.emplace_back(Object::borrow(storage_type), dtype);
  return dtype;
}

bool StorageReferences::is_storage_type(PyObject* object) const {
  return object == untyped_storage_.get() ||
         Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(storage_type_.get());
}

bool StorageReferences::says(PyObject* object, const char* text, Object& known) {
  if (object == known.get()) return true;
  if (text_of(object) != text) return false;
  known = Object::borrow(object);
  return true;
}

}  // namespace ptsave
