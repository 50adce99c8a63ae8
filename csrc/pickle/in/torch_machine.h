// torch's own restricted unpickler, for single steps, and the functions of torch that the fast
// steps recognize.  A step is a pickle of a few bytes ("h\0h\1R." for REDUCE) with the operands in
// its memo.  So the policy, calls and errors are always the installed torch's.  Needs the GIL.
#pragma once

#include <Python.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pickle/common/object.h"

namespace ptsave {

// Pauses Python's cyclic garbage collector, because all objects of a load stay alive, and the
// collector would examine them again and again.
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

// Ends the pause while other Python code runs.  That code finds the collector as it was before the
// load, and may switch it on and off.
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
               CollectorPause& pause)
      : persistent_load_(persistent_load),
        encoding_(encoding),
        pause_(pause),
        unpickler_type_(
            unpickler_type != nullptr
                ? Object::borrow(unpickler_type)
                : attribute(import_module("torch._weights_only_unpickler"), "Unpickler")),
        bytes_io_(attribute(import_module("io"), "BytesIO")) {}

  // Returns the object that `program` leaves on the stack; `memo` is its initial memo.
  Object run(std::string_view program, std::initializer_list<PyObject*> memo = {}) const {
    const Object dict = Object::checked(PyDict_New());
    long i = 0;
    for (PyObject* value : memo) {
      const Object key = Object::checked(PyLong_FromLong(i++));
      checked(PyDict_SetItem(dict.get(), key.get(), value));
    }
    const CollectorResumed resumed(pause_);
    const Object bytes = Object::checked(
        PyBytes_FromStringAndSize(program.data(), static_cast<Py_ssize_t>(program.size())));
    const Object file = Object::checked(PyObject_CallOneArg(bytes_io_.get(), bytes.get()));
    const Object arguments = Object::checked(PyTuple_Pack(1, file.get()));
    const Object keywords = Object::checked(Py_BuildValue("{sO}", "encoding", encoding_));
    const Object unpickler =
        Object::checked(PyObject_Call(unpickler_type_.get(), arguments.get(), keywords.get()));
    checked(PyObject_SetAttrString(unpickler.get(), "memo", dict.get()));
    checked(PyObject_SetAttrString(unpickler.get(), "persistent_load", persistent_load_));
    return call_method(unpickler.get(), "load");
  }

  Object load_persistent(PyObject* id) const {
    const CollectorResumed resumed(pause_);
    return Object::checked(PyObject_CallOneArg(persistent_load_, id));
  }
  Object call(PyObject* callable, PyObject* arguments) const {
    const CollectorResumed resumed(pause_);
    return Object::checked(PyObject_Call(callable, arguments, nullptr));
  }

 private:
  PyObject* persistent_load_;
  PyObject* encoding_;
  CollectorPause& pause_;
  Object unpickler_type_;
  Object bytes_io_;
};

// The functions of torch that rebuild tensors and need special treatment.
enum class Rebuild : std::uint8_t {
  kNone,
  kTensor,  // _rebuild_tensor, and so on
  kTensorV2,
  kTensorV3,
  kParameter,
  kQuantized,  // _rebuild_qtensor
  kFromType,   // _rebuild_from_type_v2, which calls another function
};

struct RebuildFunction {
  const char* module;
  const char* name;
  Rebuild kind;
};

inline constexpr std::array kRebuildFunctions = {
    RebuildFunction{"torch._utils", "_rebuild_tensor_v2", Rebuild::kTensorV2},
    RebuildFunction{"torch._utils", "_rebuild_tensor_v3", Rebuild::kTensorV3},
    RebuildFunction{"torch._utils", "_rebuild_tensor", Rebuild::kTensor},
    RebuildFunction{"torch._utils", "_rebuild_parameter", Rebuild::kParameter},
    RebuildFunction{"torch._utils", "_rebuild_qtensor", Rebuild::kQuantized},
    RebuildFunction{"torch._tensor", "_rebuild_from_type_v2", Rebuild::kFromType},
};

// Whether the rebuild functions, and the functions that they call, are torch's own, not replaced.
inline bool internals_are_torchs() {
  const Object utils = import_module("torch._utils");
  for (const char* name : {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
                           "_rebuild_parameter", "_restore_device_fake_mode"}) {
    if (!is_function_of(attribute(utils, name).get(), utils)) return false;
  }
  const Object module = import_module("torch.nn.parameter");
  const Object parameter = attribute(module, "Parameter");
  return attribute(import_module("torch.nn"), "Parameter").get() == parameter.get() &&
         is_function_of(attribute(parameter, "__new__").get(), module);
}

// The globals of one pickle; each is looked up once.
class Globals {
 public:
  explicit Globals(const TorchMachine& torch) : torch_(torch) {}

  // `lines` are the operands of GLOBAL, with their newlines.  They must outlive this object.
  Object resolve(std::string_view lines) {
    const auto found = resolved_.find(lines);
    if (found != resolved_.end()) return found->second;
    Object object = torch_.run(std::string("c").append(lines).append("."));
    resolved_.emplace(lines, object);
    note_default(object.get());
    if (PyFunction_Check(object.get())) note_function(object.get());
    return object;
  }

  // Whether the object was resolved here and is allowed by torch by default.
  bool is_default(PyObject* object) const {
    return std::ranges::find(defaults_, object) != defaults_.end();
  }
  // The kind of a resolved global, if it is one of torch's rebuild functions.
  Rebuild rebuild_of(PyObject* function) const {
    for (const auto& [known, kind] : rebuilds_) {
      if (known == function) return kind;
    }
    return Rebuild::kNone;
  }
  // _rebuild_tensor_v2, which makes nearly all tensors; null before it is resolved.
  PyObject* tensor_v2() const { return tensor_v2_; }
  // Whether none of the functions behind the rebuild functions was replaced.
  bool rebuilds_are_torchs() const { return rebuilds_are_torchs_; }

 private:
  void note_default(PyObject* object) {
    const Object module = import_module("torch._weights_only_unpickler");
    const Object allowed = call_method(module.get(), "_get_allowed_globals");
    if (!PyDict_Check(allowed.get())) return;
    PyObject* value = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(allowed.get(), &i, nullptr, &value) != 0;) {
      if (value == object) return defaults_.push_back(object);
    }
  }
  void note_function(PyObject* function) {
    for (const auto& [module, name, kind] : kRebuildFunctions) {
      if (attribute(import_module(module), name).get() != function) continue;
      if (rebuilds_.empty()) rebuilds_are_torchs_ = internals_are_torchs();
      rebuilds_.emplace_back(function, kind);
      if (kind == Rebuild::kTensorV2) tensor_v2_ = function;
      return;
    }
  }

  const TorchMachine& torch_;
  std::unordered_map<std::string_view, Object> resolved_;
  std::vector<PyObject*> defaults_;  // kept alive by resolved_, like the next ones
  std::vector<std::pair<PyObject*, Rebuild>> rebuilds_;
  PyObject* tensor_v2_ = nullptr;
  bool rebuilds_are_torchs_ = false;
};

}  // namespace ptsave
