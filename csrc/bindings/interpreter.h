// Text, exceptions and the GIL, for modules with and without torch.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <type_traits>

#include "core/pipeline/pipeline.h"
#include "core/read/reader.h"

namespace ptsave {

namespace py = pybind11;
using namespace py::literals;

// Convert text without loss: bytes that are not valid UTF-8 become surrogates, and back.
py::str decode(const std::string& text);
std::string encode(const py::str& text);

// Translates a module's C++ exceptions into CorruptCheckpointError or OSError, with the file's
// name.
void register_errors(py::module_& module);

// Takes the GIL back.  In an exiting interpreter, a daemon thread that asks for the GIL would be
// ended by unwinding its stack.  Instead it waits here for the end of the process.
void take_gil(PyThreadState* state);

// Issues a CheckpointWarning if a transfer used ordinary memory instead of page-locked memory.
void warn_of_ordinary_memory();

// Runs `call` without the GIL.  This is a function and not a guard object, because taking the GIL
// can unwind the stack, which a destructor must not do.
template <typename Call>
auto without_gil(const Call& call) -> decltype(call()) {
  PyThreadState* const state = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
      take_gil(state);
      warn_of_ordinary_memory();
    } else {
      auto result = call();
      take_gil(state);
      warn_of_ordinary_memory();
      return result;
    }
  } catch (...) {
    if (PyGILState_Check() == 0) take_gil(state);
    throw;
  }
}

// Runs `call` with the GIL, on a thread inside without_gil().  If the interpreter exits meanwhile,
// it ends this thread by unwinding its stack, and the unwinding stops here.  During unwinding no
// object that needs the GIL may be destroyed, so `call` uses the C API without guards.
template <typename Call>
void with_gil(const Call& call) {
  take_gil(PyGILState_GetThisThreadState());
  try {
    call();
  } catch (const abi::__forced_unwind&) {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  } catch (...) {
    PyEval_SaveThread();
    throw;
  }
  PyEval_SaveThread();
}

// Drops the result of a C API call; throws if it is null.
void drop_result(PyObject* result);

// Makes a Poll for a waiting thread without the GIL.  The Poll runs signal handlers, and reports
// the progress (or 0) to `callback`.
Poll make_poll(const std::function<std::uint64_t()>& progress = {},
               const py::object& callback = py::none());

// The payload of record i, which must exist.  With `verify`, throws FormatError for a wrong CRC.
py::bytes read_record(const ArchiveReader& reader, std::size_t i, bool verify);

}  // namespace ptsave
