// torch's own restricted unpickler, for single steps, and the functions of torch that the fast
// steps recognize.  A step is a pickle of a few bytes ("h\0h\1R." for REDUCE) with the operands in
// its memo.  So its policy, calls and errors are always those of the installed torch.  Needs the
// GIL.
#pragma once

#include <Python.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pickle/common/object.h"

namespace ptsave {

// Pauses Python's cyclic garbage collector, because all objects of a load stay, and the collector
// would examine them again and again.
class CollectorPause {
 public:
  CollectorPause() { pause(); }
  CollectorPause(const CollectorPause&) = delete;
  CollectorPause& operator=(const CollectorPause&) = delete;
  ~CollectorPause() { resume(); }

  void pause() { was_enabled_ = PyGC_Disable() != 0; }
  // Restores the state before pause().
  void resume() {
    if (was_enabled_) PyGC_Enable();
    was_enabled_ = false;
  }

 private:
  bool was_enabled_ = false;
};

// Ends the pause while other Python code runs, which then finds the collector as without a load,
// and may switch it on and off.
class CollectorResumed {
 public:
  explicit CollectorResumed(CollectorPause& pause) : pause_(pause) { pause_.resume(); }
  CollectorResumed(const CollectorResumed&) = delete;
  CollectorResumed& operator=(const CollectorResumed&) = delete;
  ~CollectorResumed() { pause_.pause(); }

 private:
  CollectorPause& pause_;
};

// Runs small pickles on torch._weights_only_unpickler.Unpickler or a subclass that allows more.
class TorchMachine {
 public:
  // `unpickler_type` is that subclass, or null.
  TorchMachine(PyObject* persistent_load, PyObject* encoding, PyObject* unpickler_type,
               CollectorPause& pause);

  // Returns the object that `program` leaves on the stack; `memo` is its initial memo.
  Object run(std::string_view program, std::initializer_list<PyObject*> memo = {}) const;
  Object run(std::string_view program, const Object& memo) const;

  Object load_persistent(PyObject* id) const;
  Object call(PyObject* callable, PyObject* arguments) const;

 private:
  PyObject* persistent_load_;
  PyObject* encoding_;
  CollectorPause& pause_;
  Object unpickler_type_;
  Object bytes_io_;
};

// The functions of torch that rebuild tensors and need attention.
enum class Rebuild : std::uint8_t {
  kNone,
  kTensor,  // _rebuild_tensor, and so on
  kTensorV2,
  kTensorV3,
  kParameter,
  kQuantized,  // _rebuild_qtensor
  kFromType,   // _rebuild_from_type_v2, which calls another function
};

// The globals of one pickle; each is looked up once.
class Globals {
 public:
  explicit Globals(const TorchMachine& torch) : torch_(torch) {}

  // `lines` are the operands of GLOBAL, with their newlines.  They must outlive this object.
  Object resolve(std::string_view lines);

  // Whether the object was resolved here and is allowed by torch by default.
  bool is_default(PyObject* object) const;
  // The kind of a resolved global, if it is one of torch's rebuild functions.
  Rebuild rebuild_of(PyObject* function) const;
  // _rebuild_tensor_v2, which makes nearly all tensors; null before it is resolved.
  PyObject* tensor_v2() const { return tensor_v2_; }
  // Whether none of the functions behind the rebuild functions was replaced.
  bool rebuilds_are_torchs() const { return rebuilds_are_torchs_; }

 private:
  void note_default(PyObject* object);
  void note_function(PyObject* function);

  const TorchMachine& torch_;
  std::unordered_map<std::string_view, Object> resolved_;
  std::vector<PyObject*> defaults_;  // kept alive by resolved_, like the next ones
  std::vector<std::pair<PyObject*, Rebuild>> rebuilds_;
  PyObject* tensor_v2_ = nullptr;
  bool rebuilds_are_torchs_ = false;
};

}  // namespace ptsave
