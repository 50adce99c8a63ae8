#include "bindings/interpreter.h"

#include <cstring>
#include <exception>

#include "core/base/error.h"
#include "core/pipeline/stager.h"
#include "pickle/common/object.h"

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
                 "record"_a = record, "offset"_a = offset, "lacks_end"_a = lacks_end));
}

}  // namespace

void register_errors(py::module_& module) {
  // Registered locally: pybind11 would otherwise ask every module to translate all modules'
  // exceptions.
  py::register_local_exception<LayoutMismatch>(module, "LayoutMismatchError", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const IoError& error) {
      if (error.errnum() != 0) return set_os_error(error);
      set_corrupt(FormatError("unexpected end of file",
                              error.path() + " ends before the bytes to be read", {},
                              FormatError::kNoOffset, error.path()));
    } catch (const FormatError& error) {
      set_corrupt(error);
    } catch (const PythonError&) {
      if (PyErr_Occurred() == nullptr) py::set_error(PyExc_SystemError, "an exception got lost");
    }
  });
}

namespace {

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

void take_gil(PyThreadState* state) {
  while (is_finalizing()) std::this_thread::sleep_for(std::chrono::hours(1));
  PyEval_RestoreThread(state);
}

void warn_of_ordinary_memory() {
  if (!used_ordinary_memory().exchange(false)) return;
  const py::object category = py::module_::import("ptsave.errors").attr("CheckpointWarning");
  py::module_::import("ptsave.support.calls")
      .attr("warn_user")(
          "the system refused to lock host memory for copies from or to an accelerator, so they "
          "went through ordinary memory, which takes longer: free host memory, raise the limit "
          "that `ulimit -l` shows, or lower PTSAVE_MAX_PINNED_BYTES",
          category);
}

void drop_result(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  Py_DECREF(result);
}

Poll make_poll(const std::function<std::uint64_t()>& progress, const py::object& callback) {
  return [progress, callback] {
    with_gil([&] {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      const auto done = static_cast<unsigned long long>(progress ? progress() : 0);
      if (!callback.is_none()) drop_result(PyObject_CallFunction(callback.ptr(), "K", done));
    });
  };
}

// Reads into the bytes object: copying several MB would take as long as reading them.
py::bytes read_record(const ArchiveReader& reader, std::size_t i, bool verify) {
  const std::uint64_t offset = without_gil([&] { return reader.stored_payload_offset(i); });
  const auto nbytes = static_cast<Py_ssize_t>(reader.index().records()[i].nbytes);
  auto payload = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, nbytes));
  if (!payload) throw py::error_already_set();
  without_gil([&] { reader.read(i, offset, PyBytes_AS_STRING(payload.ptr()), verify); });
  return payload;
}

}  // namespace ptsave
