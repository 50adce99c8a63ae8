// torch's own restricted unpickler, for single steps, and the functions of torch that the fast
// steps recognize.  A step is a pickle of a few bytes ("h\0h\1R." for REDUCE) with the operands in
// its memo, so its policy, its calls and its errors are torch's by construction, of the installed
// version.  The GIL is held wherever these are used.
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

// Python's cyclic garbage collector, paused.  A load makes nothing but objects that stay, and the
// collector would look at all of them again and again.
class CollectorPause {
 public:
  CollectorPause() { pause(); }
  CollectorPause(const CollectorPause&) = delete;
  CollectorPause& operator=(const CollectorPause&) = delete;
  ~CollectorPause() { resume(); }

  void pause() { was_enabled_ = PyGC_Disable() != 0; }
  // Leaves it as it was before pause().
  void resume() {
    if (was_enabled_) PyGC_Enable();
    was_enabled_ = false;
  }

 private:
  bool was_enabled_ = false;
};

// While other Python code runs, that is: it finds the collector as it would without a load, and can
// switch it on and off.
class CollectorResumed {
 public:
  explicit CollectorResumed(CollectorPause& pause) : pause_(pause) { pause_.resume(); }
  CollectorResumed(const CollectorResumed&) = delete;
  CollectorResumed& operator=(const CollectorResumed&) = delete;
  ~CollectorResumed() { pause_.pause(); }

 private:
  CollectorPause& pause_;
};

// Runs small pickles on torch._weights_only_unpickler.Unpickler, or a subclass that allows more.
class TorchMachine {
 public:
  // `unpickler_type` is that subclass, or null.
  TorchMachine(PyObject* persistent_load, PyObject* encoding, PyObject* unpickler_type,
               CollectorPause& pause);

  // Returns the object that `program` leaves on the stack; its memo begins with these values.
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

// The globals of one pickle: each is asked for once.
class Globals {
 public:
  explicit Globals(const TorchMachine& torch) : torch_(torch) {}

  // `lines` are the operands of GLOBAL, with their newlines.  They must outlive this object.
  Object resolve(std::string_view lines);

  // Whether it is one of those that torch allows by default, and was resolved here.
  bool is_default(PyObject* object) const;
  // Identifies a resolved global as one of torch's functions.
  Rebuild rebuild_of(PyObject* function) const;
  // The one that makes nearly all tensors, once it was resolved.
  PyObject* tensor_v2() const { return tensor_v2_; }
  // Whether nothing that those functions use was replaced.
  bool rebuilds_are_torchs() const { return rebuilds_are_torchs_; }

 private:
  void note_default(PyObject* object);
  void note_function(PyObject* function);

  const TorchMachine& torch_;
  std::unordered_map<std::string_view, Object> resolved_;
  std::vector<PyObject*> defaults_;  // kept by resolved_, as are the next ones
  std::vector<std::pair<PyObject*, Rebuild>> rebuilds_;
  PyObject* tensor_v2_ = nullptr;
  bool rebuilds_are_torchs_ = false;
};

}  // namespace ptsave
