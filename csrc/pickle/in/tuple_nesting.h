// Tracks how deep tuples are nested, because Python hashes them recursively, without a look at the
// C stack, and a part as often as it occurs.
#pragma once

#include <Python.h>

#include <cstdint>
#include <unordered_map>

namespace ptsave {

// The GIL is held wherever this is used.
class TupleNesting {
 public:
  // To be told of every tuple that is made.
  void note(PyObject* tuple);

  // Fails if hashing this object would be dangerous.
  void check_key(PyObject* key) const;

  // Fails if there is any tuple that is dangerous to hash: for calls that may do anything.
  void check_call() const;

 private:
  struct Nesting {
    std::uint32_t depth = 1;
    std::uint32_t n_tuples = 1;  // that are hashed with it, itself included
    bool is_dangerous() const;
  };

  Nesting nesting_of(PyObject* tuple) const;

  std::unordered_map<PyObject*, Nesting> nestings_;  // of tuples with tuples in them
  bool any_is_dangerous_ = false;
};

}  // namespace ptsave
