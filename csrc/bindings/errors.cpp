// Translates core's exceptions into Python exceptions.
#include "bindings/errors.h"

#include <cstring>
#include <exception>
#include <string>

#include "core/base/error.h"
#include "core/read/reader.h"
#include "pickle/common/object.h"

namespace py = pybind11;

namespace ptsave {

py::str decode(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "surrogateescape"));
}

std::string encode(const py::str& text) {
  const auto bytes = py::reinterpret_steal<py::bytes>(
      PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

namespace {

// A path was encoded by Python's os.fsencode.
py::object decode_path(const std::string& path) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<py::ssize_t>(path.size())));
}

void set_error(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

void set_os_error(const IoError& error) {
  const auto os_error = py::reinterpret_borrow<py::object>(PyExc_OSError);
  const py::object value = os_error(error.errnum(), std::string(std::strerror(error.errnum())),
                                    decode_path(error.path()));
  value.attr("operation") = error.operation();
  set_error(value);
}

// Sets a CorruptCheckpointError.  ptsave.errors is imported by the first error.
void set_corrupt(const FormatError& error) {
  const py::object record =
      error.record().empty() ? py::none() : py::object(decode(error.record()));
  const py::object offset =
      error.offset() == FormatError::kNoOffset ? py::none() : py::object(py::int_(error.offset()));
  const bool lacks_end = dynamic_cast<const MissingEndError*>(&error) != nullptr;
  const py::object make = py::module_::import("ptsave.errors").attr("corrupt_archive");
  set_error(make(decode_path(error.path()), decode(error.reason()), decode(error.detail()),
                 py::arg("record") = record, py::arg("offset") = offset,
                 py::arg("lacks_end") = lacks_end));
}

}  // namespace

void register_errors(py::module_& module) {
  // Register them locally: pybind11 would otherwise ask every module about the exceptions of all.
  py::register_local_exception<LayoutMismatch>(module, "LayoutMismatchError", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const IoError& error) {
      if (error.errnum() != 0) return set_os_error(error);
      set_corrupt(FormatError("unexpected end of file",
                              error.path() + " ends before what was to be read", {},
                              FormatError::kNoOffset, error.path()));
    } catch (const FormatError& error) {
      set_corrupt(error);
    } catch (const PythonError&) {
      if (PyErr_Occurred() == nullptr) py::set_error(PyExc_SystemError, "an exception got lost");
    }
  });
}

}  // namespace ptsave
