#include "bindings/stream_sink.h"

#include <cstddef>
#include <cstdint>

#include "bindings/gil.h"

namespace py = pybind11;

namespace ptsave {

StreamSink make_stream_sink(const py::function& write, const py::function& skip, const Poll& poll) {
  return [&write, &skip, &poll](const std::byte* data, std::uint64_t nbytes) {
    poll();
    with_gil([&] {
      if (data == nullptr) {
        const auto hole = static_cast<unsigned long long>(nbytes);
        return drop_result(PyObject_CallFunction(skip.ptr(), "K", hole));
      }
      auto* const bytes = const_cast<char*>(reinterpret_cast<const char*>(data));
      PyObject* const view =
          PyMemoryView_FromMemory(bytes, static_cast<Py_ssize_t>(nbytes), PyBUF_READ);
      if (view == nullptr) throw py::error_already_set();
      PyObject* const result = PyObject_CallOneArg(write.ptr(), view);
      Py_DECREF(view);
      drop_result(result);
    });
  };
}

}  // namespace ptsave
