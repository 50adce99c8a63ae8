// Objects of torch and Python that the pickler refers to, and a check that both still behave as it
// assumes.
//
// One instance for the process, made at the first use and never freed.  Needs the GIL.
#pragma once

#include <Python.h>

#include <optional>
#include <vector>

#include "pickle/common/object.h"

namespace ptsave {

class PickleEnvironment {
 public:
  static const PickleEnvironment& get();

  // Whether torch and Python behave as out of the box: no mode is active that could see a tensor's
  // methods being called, none of those methods has been replaced, and no reducer is registered for
  // a type that the pickler reduces by itself.
  bool is_default() const;

  // torch.storage's class for the typed storages of a dtype, or nothing if the dtype has none; then
  // its tensors are saved with an untyped storage.  HandOver: torch cannot save such a tensor.
  std::optional<Object> typed_storage_class(PyObject* dtype) const;

  // The location from which torch.load restores this storage, such as "cuda:0": the answer of the
  // first package registered with torch.serialization that has one.  HandOver: packages other than
  // torch's would be asked.
  Object location_of(PyObject* untyped_storage) const;

  // As they are now: people replace them.
  Object rebuild_function(const char* name) const;
  Object untyped_storage() const;

  // A new dict: whether the tensor is a conjugate, or negated, without its bytes being so.
  Object tensor_metadata(PyObject* tensor) const;

  PyTypeObject* typed_storage_type() const { return type(typed_storage_); }
  PyTypeObject* ordered_dict_type() const { return type(ordered_dict_); }
  PyTypeObject* size_type() const { return type(size_); }
  // The very objects that string constants in the sources of torch and Python are.
  PyObject* word_storage() const { return word_storage_.get(); }
  PyObject* word_latin1() const { return word_latin1_.get(); }
  PyObject* codecs_encode() const { return codecs_encode_.get(); }
  PyObject* module_names() const { return module_names_.get(); }
  PyObject* global_names() const { return global_names_.get(); }

  // Whether __getstate__ of an object that inherits object's has something to save.
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
  Object module_names_;  // of Python 2, by those of Python 3
  Object global_names_;  // pairs of module and name of Python 2, by those of Python 3
  Object codecs_encode_;
  Object word_storage_;
  Object word_latin1_;
  Object getstate_;  // nothing before Python 3.11
  std::vector<Object> tensor_members_;
};

}  // namespace ptsave
