// The restricted machine's stack, with its marks.
#pragma once

#include <Python.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "pickle/common/object.h"
#include "pickle/in/memo.h"

namespace ptsave {

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

}  // namespace ptsave
