// Imports modules and looks up attributes.  Names are the interned str objects that Python's own
// code uses, because any other would fill the interpreter's method cache.  Needs the GIL.
#pragma once

#include <Python.h>

#include "pickle/common/object.h"

namespace ptsave {

inline Object import_module(const char* name) {
  return Object::checked(PyImport_ImportModule(name));
}

inline Object interned(const char* text) {
  return Object::checked(PyUnicode_InternFromString(text));
}

inline Object attribute(PyObject* object, const Object& interned_name) {
  return Object::checked(PyObject_GetAttr(object, interned_name.get()));
}

inline Object attribute(PyObject* object, const char* name) {
  return attribute(object, interned(name));
}

inline Object attribute(const Object& object, const char* name) {
  return attribute(object.get(), name);
}

// The attribute, or nothing if the object does not have it.
inline Object attribute_or_nothing(PyObject* object, const char* name) {
  Object found = Object::steal(PyObject_GetAttr(object, interned(name).get()));
  if (found) return found;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw PythonError{};
  PyErr_Clear();
  return found;
}

// Whether the object is a function from the module's source, not a replacement.
inline bool is_function_of(PyObject* object, const Object& module) {
  return PyFunction_Check(object) != 0 &&
         PyFunction_GET_GLOBALS(object) == PyModule_GetDict(module.get());
}

inline Object call_method(PyObject* object, const char* name) {
  return Object::checked(PyObject_CallNoArgs(attribute(object, name).get()));
}

}  // namespace ptsave
