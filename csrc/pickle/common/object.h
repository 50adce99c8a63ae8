// Owned references to Python objects, and the exception for errors of the C API.  Needs the GIL.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

namespace ptsave {

// A call into Python failed and has set its exception, which the binding passes on unchanged.
struct PythonError {};

// One strong reference, or none.
class Object {
 public:
  Object() = default;
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object(const Object& other) : object_(Py_XNewRef(other.object_)) {}
  Object& operator=(Object other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  // Takes over a new reference.
  static Object steal(PyObject* object) { return Object(object); }
  // Takes over a new reference from a C API call; throws PythonError if it is null.
  static Object checked(PyObject* object) {
    if (object == nullptr) throw PythonError{};
    return Object(object);
  }
  static Object borrow(PyObject* object) { return Object(Py_XNewRef(object)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Object(PyObject* object) : object_(object) {}

  PyObject* object_ = nullptr;
};

// Checks the result of a C API call that returns -1 on failure.
inline int checked(int result) {
  if (result < 0) throw PythonError{};
  return result;
}

[[noreturn]] inline void fail(PyObject* type, const char* message) {
  PyErr_SetString(type, message);
  throw PythonError{};
}

// Make a str from UTF-8.  Only decoded_text() accepts surrogates.
inline Object new_text(std::string_view utf8) {
  return Object::checked(
      PyUnicode_FromStringAndSize(utf8.data(), static_cast<Py_ssize_t>(utf8.size())));
}
inline Object decoded_text(std::string_view utf8) {
  return Object::checked(
      PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "surrogatepass"));
}

// The text of a str; nothing for another object, or for one with lone surrogates.
inline std::optional<std::string_view> text_of(PyObject* object) {
  if (!PyUnicode_CheckExact(object)) return std::nullopt;
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view(text, static_cast<std::size_t>(size));
}

// The value of an int; nothing for another object (also a bool), or for one beyond 64 bits.
inline std::optional<std::int64_t> count_of(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const long long n = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) return std::nullopt;
  return n;
}

inline std::optional<std::int64_t> natural_number(PyObject* object) {
  const std::optional<std::int64_t> n = count_of(object);
  return n && *n >= 0 ? n : std::nullopt;
}

// The value of a key; null if it is missing.
inline PyObject* item_or_null(PyObject* dict, PyObject* key) {
  PyObject* const item = PyDict_GetItemWithError(dict, key);
  if (item == nullptr && PyErr_Occurred() != nullptr) throw PythonError{};
  return item;
}

// Imports modules and looks up attributes.  Names are the interned str objects that Python's own
// code uses, because any other str would fill the interpreter's method cache.

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
