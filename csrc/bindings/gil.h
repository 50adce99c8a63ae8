// Releases and reacquires the GIL, so that a thread survives the interpreter's exit.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <type_traits>

#include "core/pipeline/pipeline.h"

namespace ptsave {

// Takes the GIL back.  Once the interpreter is exiting, a thread that asks for it is ended by
// unwinding its stack; a daemon thread waits here for the end of the process instead.
void take_gil(PyThreadState* state);

// Not a guard object: taking the GIL can unwind (see above), which a destructor must not.
template <typename Call>
auto without_gil(const Call& call) -> decltype(call()) {
  PyThreadState* const state = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
      take_gil(state);
    } else {
      auto result = call();
      take_gil(state);
      return result;
    }
  } catch (...) {
    if (PyGILState_Check() == 0) take_gil(state);
    throw;
  }
}

// Calls `call` with the GIL, on a thread that without_gil() has taken it from.  If the interpreter
// exits meanwhile, this thread is ended by unwinding; nothing that needs the GIL may be destroyed
// then, so `call` uses the C API without guards, and the unwinding stops here.
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

// Takes over a reference that a C API call returned; a null one is an exception.
void drop_result(PyObject* result);

// Called on the waiting thread, without the GIL: lets signal handlers run and reports progress.
Poll make_poll(const std::function<std::uint64_t()>& progress, const pybind11::object& callback);

}  // namespace ptsave
