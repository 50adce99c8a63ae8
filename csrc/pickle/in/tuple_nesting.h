// Tracks how deep tuples are nested.  Python hashes tuples recursively without checking the C
// stack, and hashes a shared part as often as it occurs.
#pragma once

#include <Python.h>

#include <cstdint>
#include <unordered_map>

namespace ptsave {

// Needs the GIL.
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
