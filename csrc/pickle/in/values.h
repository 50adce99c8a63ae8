// Values of the restricted machine, on its stack and in its memo, and how deep they are nested.
// Needs the GIL.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <span>
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

[[noreturn]] inline void fail(PyObject* type, const char* message) {
  PyErr_SetString(type, message);
  throw PythonError{};
}

// torch's machine has one Python list for each mark and only uses the last list.  So no access
// reaches below the topmost mark, and a missing value raises a list's error.  Needs the GIL.
class ValueStack {
 public:
  // The number of values above the topmost mark.
  std::size_t depth() const { return values_.size() - base_; }

  void push(Value value) { values_.push_back(std::move(value)); }
  void push(Object object) { values_.emplace_back(std::move(object)); }
  Value pop() {
    if (depth() == 0) fail(PyExc_IndexError, "pop from empty list");
    Value value = std::move(values_.back());
    values_.pop_back();
    return value;
  }
  Value& top() {
    require(1);
    return values_.back();
  }
  void require(std::size_t n) const {
    if (depth() < n) fail(PyExc_IndexError, "list index out of range");
  }

  // The topmost `n` values, which must exist.
  std::span<Value> last(std::size_t n) { return std::span(values_).last(n); }
  void drop(std::size_t n) { values_.resize(values_.size() - n); }

  void mark() {
    marks_.push_back(base_);
    base_ = values_.size();
  }
  // Removes the topmost mark, and returns the number of values above it.
  std::size_t pop_mark() {
    if (marks_.empty()) fail(PyExc_IndexError, "pop from empty list");
    const std::size_t n = depth();
    base_ = marks_.back();
    marks_.pop_back();
    return n;
  }

 private:
  std::vector<Value> values_;
  std::vector<std::size_t> marks_;  // base_ outside each mark
  std::size_t base_ = 0;            // the number of values below the topmost mark
};

// Tracks how deep tuples are nested.  Python hashes tuples recursively without checking the C
// stack, and hashes a shared part as often as it occurs.  Needs the GIL.
class TupleNesting {
 public:
  // Must be called for every new tuple.
  void note(PyObject* tuple);

  // Fails if hashing this key would be dangerous.
  void check_key(PyObject* key) const;

  // Fails if any tuple is dangerous to hash; for calls that may hash anything.
  void check_call() const;

 private:
  struct Nesting {
    std::uint32_t depth = 1;
    std::uint32_t n_tuples = 1;  // hashed with it, itself included
    bool is_dangerous() const;
  };

  Nesting nesting_of(PyObject* tuple) const;

  std::unordered_map<PyObject*, Nesting> nestings_;  // for tuples that contain tuples
  bool any_is_dangerous_ = false;
};

}  // namespace ptsave
