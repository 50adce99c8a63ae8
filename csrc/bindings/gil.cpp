#include "bindings/gil.h"

namespace py = pybind11;

namespace ptsave {
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

void drop_result(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  Py_DECREF(result);
}

Poll make_poll(const std::function<std::uint64_t()>& progress, const py::object& callback) {
  return [progress, callback] {
    with_gil([&] {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      const auto done = static_cast<unsigned long long>(progress());
      if (!callback.is_none()) drop_result(PyObject_CallFunction(callback.ptr(), "K", done));
    });
  };
}

}  // namespace ptsave
