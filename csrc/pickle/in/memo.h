// Values of the restricted machine, on its stack and in its memo.  Needs the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pickle/common/object.h"

namespace ptsave {

// A Python object, or the number of a load's storage that has no Python object yet (and mostly
// never gets one).  It is one machine word, because stacks and memos are full of values.
class Value {
 public:
  Value() = default;
  explicit Value(Object object) : bits_(reinterpret_cast<std::uintptr_t>(object.release())) {}
  static Value storage(std::size_t index) {
    Value value;
    value.bits_ = index << 1 | 1;
    return value;
  }

  Value(Value&& other) noexcept : bits_(std::exchange(other.bits_, 0)) {}
  Value(const Value& other) : bits_(other.bits_) {
    if (!is_storage()) Py_XINCREF(get());
  }
  Value& operator=(Value other) noexcept {
    std::swap(bits_, other.bits_);
    return *this;
  }
  ~Value() {
    if (!is_storage()) Py_XDECREF(get());
  }

  explicit operator bool() const { return bits_ != 0; }
  bool is_storage() const { return (bits_ & 1) != 0; }
  std::size_t storage_index() const { return bits_ >> 1; }
  // Not for storages.
  Object object() && { return Object::steal(reinterpret_cast<PyObject*>(std::exchange(bits_, 0))); }
  // Borrowed; not for storages.
  PyObject* get() const { return reinterpret_cast<PyObject*>(bits_); }

 private:
  std::uintptr_t bits_ = 0;
};

// The memo of one pickle.  It keeps only entries that the pickle reads, because picklers write an
// entry for nearly every object and read few.
class Memo {
 public:
  // Finds the entries that the pickle reads.
  explicit Memo(std::string_view pickle);

  // Whether the pickle reads entry `i`, so that it must be kept.
  bool is_read(std::uint32_t i) const {
    return i < read_.size() ? static_cast<bool>(read_[i]) : i >= n_near_ && far_read_.contains(i);
  }

  // Only for entries that are read.
  void put(std::uint32_t i, const Value& value);

  // The value of an entry; null if nothing was put there.
  const Value* get(std::uint32_t i) const {
    if (i < near_.size()) return near_[i] ? &near_[i] : nullptr;
    return get_far(i);
  }

 private:
  void note_read(std::uint32_t i);
  const Value* get_far(std::uint32_t i) const;

  // Indices below the pickle's size are near: their memory is in proportion to the pickle.
  std::size_t n_near_;
  std::vector<bool> read_;
  std::unordered_set<std::uint32_t> far_read_;
  std::vector<Value> near_;
  std::unordered_map<std::uint32_t, Value> far_;
};

}  // namespace ptsave
