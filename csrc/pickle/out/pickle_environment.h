// Objects of torch and Python for the pickler, and a check that both behave as it assumes.
//
// One instance per process, made at first use and never freed.  Needs the GIL.
#pragma once

#include <Python.h>

#include <optional>
#include <vector>

#include "pickle/common/object.h"

namespace ptsave {

class PickleEnvironment {
 public:
  static const PickleEnvironment& get();

  // Whether torch and Python have their default behaviour.  No active mode may see calls of a
  // tensor's methods, and none of these methods may be replaced.  No reducer may be registered for
  // a type that the pickler reduces itself.
  bool is_default() const;

  // torch's class for a dtype's typed storages; nothing if the dtype's tensors are saved with an
  // untyped storage.  Throws HandOver if torch cannot save such a tensor.
  std::optional<Object> typed_storage_class(PyObject* dtype) const;

  // The location that torch saves for this storage, such as "cuda:0": the first answer of the
  // packages registered with torch.serialization.  Throws HandOver if it would have to ask a
  // package that is not torch's.
  Object location_of(PyObject* untyped_storage) const;

  // Look up the current attributes, because users replace them.
  Object rebuild_function(const char* name) const;
  Object untyped_storage() const;

  // A new dict that says whether the tensor is a lazy conjugate or a lazy negation.
  Object tensor_metadata(PyObject* tensor) const;

  PyTypeObject* typed_storage_type() const { return type(typed_storage_); }
  PyTypeObject* ordered_dict_type() const { return type(ordered_dict_); }
  PyTypeObject* size_type() const { return type(size_); }
  // The same objects as the string constants in the sources of torch and Python.
  PyObject* word_storage() const { return word_storage_.get(); }
  PyObject* word_latin1() const { return word_latin1_.get(); }
  PyObject* codecs_encode() const { return codecs_encode_.get(); }
  PyObject* module_names() const { return module_names_.get(); }
  PyObject* global_names() const { return global_names_.get(); }

  // Whether object.__getstate__ of this object returns a state to save.
  bool has_state(PyObject* object) const;

 private:
  PickleEnvironment();

  static PyTypeObject* type(const Object& object) {
    return reinterpret_cast<PyTypeObject*>(object.get());
  }

  bool has_default_modes() const;
  bool has_default_function_modes() const;
  bool has_default_reducers() const;
  bool has_default_methods() const;
  bool is_torchs_tagger(PyObject* tagger) const;

  Object torch_;
  Object torch_utils_;
  Object torch_tensor_;
  Object torch_hooks_;
  Object torch_parameter_;
  Object torch_storage_;
  Object torch_serialization_;
  Object typed_storage_;
  Object size_;
  Object ordered_dict_;
  Object dispatch_table_;
  Object extension_registry_;
  Object pickle_complex_;
  Object module_names_;  // Python 2's names by Python 3's names
  Object global_names_;  // Python 2's (module, name) pairs by Python 3's
  Object codecs_encode_;
  Object word_storage_;
  Object word_latin1_;
  Object getstate_;  // nothing before Python 3.11
  std::vector<Object> tensor_members_;
};

// Reserves n levels of the limit while it lives, or none if too few are left.  Needs the GIL;
// leaves no exception set.
class RecursionLevels {
 public:
  explicit RecursionLevels(int n) {
    while (n_ < n && Py_EnterRecursiveCall("") == 0) ++n_;
    if (n_ == n) return;
    PyErr_Clear();
    leave();
    too_deep_ = true;
  }
  RecursionLevels(const RecursionLevels&) = delete;
  RecursionLevels& operator=(const RecursionLevels&) = delete;
  ~RecursionLevels() { leave(); }

  bool too_deep() const { return too_deep_; }

 private:
  void leave() {
    for (; n_ > 0; --n_) Py_LeaveRecursiveCall();
  }

  int n_ = 0;
  bool too_deep_ = false;
};

}  // namespace ptsave
