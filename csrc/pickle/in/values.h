// Values of the restricted machine, on its stack and in its memo, and how deep they are nested.
// Needs the GIL.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pickle/common/object.h"
#include "pickle/common/opcodes.h"

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

// Skips an opcode's operand.  False for STOP and for an opcode that torch's machine does not know,
// because nothing after it is run.
//
// Each case has its own constant, so that the processor can predict the place of the next opcode.
// With a table, the place would be known only after two loads.
inline bool skip_operand(PickleCursor& cursor, unsigned char op) {
  switch (op) {
    case opcode::kMark:
    case opcode::kNone:
    case opcode::kBinPersId:
    case opcode::kReduce:
    case opcode::kAppend:
    case opcode::kBuild:
    case opcode::kEmptyDict:
    case opcode::kAppends:
    case opcode::kEmptyList:
    case opcode::kSetItem:
    case opcode::kTuple:
    case opcode::kEmptyTuple:
    case opcode::kSetItems:
    case opcode::kNewObj:
    case opcode::kTuple1:
    case opcode::kTuple2:
    case opcode::kTuple3:
    case opcode::kNewTrue:
    case opcode::kNewFalse:
    case opcode::kEmptySet:
      return true;
    case opcode::kBinInt1:
    case opcode::kProto:
    case opcode::kBinPut:
      cursor.skip(1);
      return true;
    case opcode::kBinInt2:
      cursor.skip(2);
      return true;
    case opcode::kBinInt:
    case opcode::kLongBinPut:
      cursor.skip(4);
      return true;
    case opcode::kBinFloat:
      cursor.skip(8);
      return true;
    case opcode::kGlobal:
      cursor.line();
      cursor.line();
      return true;
    case opcode::kShortBinString:
    case opcode::kLong1:
      cursor.skip(little_endian(cursor.take(1)));
      return true;
    case opcode::kBinUnicode:
      cursor.skip(little_endian(cursor.take(4)));
      return true;
    default:
      return false;
  }
}

// The memo of one pickle.  It keeps only entries that the pickle reads, because picklers write an
// entry for nearly every object and read few.
class Memo {
 public:
  // Finds the entries that the pickle reads.
  explicit Memo(std::string_view pickle) : n_near_(pickle.size()) {
    PickleCursor cursor(pickle);
    while (!cursor.at_end()) {
      const unsigned char op = cursor.byte();
      if (op == opcode::kBinGet || op == opcode::kLongBinGet) {
        const std::size_t nbytes = op == opcode::kBinGet ? 1 : 4;
        note_read(static_cast<std::uint32_t>(little_endian(cursor.take(nbytes))));
      } else if (!skip_operand(cursor, op)) {
        return;
      }
    }
  }

  // Whether the pickle reads entry `i`, so that it must be kept.
  bool is_read(std::uint32_t i) const {
    return i < read_.size() ? static_cast<bool>(read_[i]) : i >= n_near_ && far_read_.contains(i);
  }

  // Skips a PUT of an entry that is not read, if that is the next opcode; false for any other PUT.
  bool skip_put(PickleCursor& cursor) const {
    if (cursor.at_end()) return true;
    const unsigned char op = cursor.peek();
    if (op != opcode::kBinPut && op != opcode::kLongBinPut) return true;
    cursor.skip(1);
    const std::size_t nbytes = op == opcode::kBinPut ? 1 : 4;
    const std::string_view operand = cursor.take(nbytes);
    return operand.size() == nbytes && !is_read(static_cast<std::uint32_t>(little_endian(operand)));
  }

  // Only for entries that are read.
  void put(std::uint32_t i, const Value& value) {
    if (i >= n_near_) {
      far_.insert_or_assign(i, value);
      return;
    }
    if (i >= near_.size()) near_.resize(std::size_t{i} + 1);
    near_[i] = value;
  }

  // The value of an entry; null if nothing was put there.
  const Value* get(std::uint32_t i) const {
    if (i < near_.size()) return near_[i] ? &near_[i] : nullptr;
    return get_far(i);
  }

 private:
  void note_read(std::uint32_t i) {
    if (i >= n_near_) {
      far_read_.insert(i);
      return;
    }
    if (i >= read_.size()) read_.resize(std::min(n_near_, std::size_t{i} * 2 + 64));
    read_[i] = true;
  }
  const Value* get_far(std::uint32_t i) const {
    const auto found = far_.find(i);
    return found == far_.end() ? nullptr : &found->second;
  }

  // Indices below the pickle's size are near: their memory is in proportion to the pickle.
  std::size_t n_near_;
  std::vector<bool> read_;
  std::unordered_set<std::uint32_t> far_read_;
  std::vector<Value> near_;
  std::unordered_map<std::uint32_t, Value> far_;
};

// The stack of the restricted machine. torch's machine has one Python list for each mark, and only
// uses the last list.  So no access reaches below the topmost mark, and a missing value raises a
// list's error.  Needs the GIL.
class ValueStack {
 public:
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
  std::vector<std::size_t> marks_;  // the value of base_ outside each mark
  std::size_t base_ = 0;            // the number of values below the topmost mark
};

// A thread's C stack of 8 MiB overflows at 60,000 to 100,000 levels.
inline constexpr std::uint32_t kMaxTupleDepth = 10'000;
inline constexpr std::uint32_t kMaxTuples =
    10'000'000;  // hashed in a second; a few shared tuples can make 2^100

// Tracks how deep tuples are nested.  Python hashes tuples recursively without checking the C
// stack, and hashes a shared part as often as it occurs.  Needs the GIL.
class TupleNesting {
 public:
  // Must be called for every new tuple.
  void note(PyObject* tuple) {
    Nesting nesting;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      PyObject* const part = PyTuple_GET_ITEM(tuple, i);
      if (!PyTuple_CheckExact(part)) continue;
      const Nesting inner = nesting_of(part);
      nesting.depth = std::max(nesting.depth, inner.depth + 1);
      nesting.n_tuples = std::min(nesting.n_tuples + inner.n_tuples, kMaxTuples + 1);
    }
    if (nesting.depth > 1) {
      nestings_.insert_or_assign(tuple, nesting);
      any_is_dangerous_ |= nesting.is_dangerous();
    } else if (!nestings_.empty()) {
      nestings_.erase(tuple);  // an earlier tuple at this address
    }
  }

  // Fails if hashing this key would be dangerous.
  void check_key(PyObject* key) const {
    if (any_is_dangerous_ && PyTuple_CheckExact(key) && nesting_of(key).is_dangerous()) {
      fail(PyExc_RecursionError, "a key is a tuple with too many levels of tuples");
    }
  }

  // Fails if any tuple is dangerous to hash; for calls that may hash anything.
  void check_call() const {
    if (any_is_dangerous_) {
      fail(PyExc_RecursionError,
           "there are tuples with too many levels for a call that may hash them");
    }
  }

 private:
  struct Nesting {
    std::uint32_t depth = 1;
    std::uint32_t n_tuples = 1;  // that are hashed with it, itself included
    bool is_dangerous() const { return depth > kMaxTupleDepth || n_tuples > kMaxTuples; }
  };

  Nesting nesting_of(PyObject* tuple) const {
    const auto found = nestings_.find(tuple);
    return found == nestings_.end() ? Nesting{} : found->second;
  }

  std::unordered_map<PyObject*, Nesting> nestings_;  // for tuples that contain tuples
  bool any_is_dangerous_ = false;
};

}  // namespace ptsave
