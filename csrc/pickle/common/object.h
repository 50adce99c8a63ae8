// Owned references to Python objects, and the exception for errors of the C API.  Needs the GIL.
#pragma once

#include <Python.h>

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

}  // namespace ptsave
