#include "pickle/in/tuple_nesting.h"

#include <algorithm>

#include "pickle/in/value_stack.h"

namespace ptsave {
namespace {

// A thread's C stack of 8 MiB overflows at 60,000 to 100,000 levels.
constexpr std::uint32_t kMaxTupleDepth = 10'000;
constexpr std::uint32_t kMaxTuples = 10'000'000;  // a second; a few shared tuples can make 2^100

}  // namespace

bool TupleNesting::Nesting::is_dangerous() const {
  return depth > kMaxTupleDepth || n_tuples > kMaxTuples;
}

TupleNesting::Nesting TupleNesting::nesting_of(PyObject* tuple) const {
  const auto found = nestings_.find(tuple);
  return found == nestings_.end() ? Nesting{} : found->second;
}

void TupleNesting::note(PyObject* tuple) {
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

void TupleNesting::check_key(PyObject* key) const {
  if (any_is_dangerous_ && PyTuple_CheckExact(key) && nesting_of(key).is_dangerous()) {
    fail(PyExc_RecursionError, "a key is a tuple of too many levels");
  }
}

void TupleNesting::check_call() const {
  if (any_is_dangerous_) {
    fail(PyExc_RecursionError, "there are tuples of too many levels for a call that may hash them");
  }
}

}  // namespace ptsave
