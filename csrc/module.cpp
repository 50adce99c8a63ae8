// The Python module ptsave._C.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "bindings/bindings.h"
#include "bindings/interpreter.h"
#include "core/crc/crc32.h"
#include "core/format/archive.h"
#include "core/hash/xxh3.h"

namespace ptsave {
namespace {

std::uint32_t crc32_of_buffer(const py::buffer& data, std::uint32_t crc) {
  const py::buffer_info info = data.request();
  return without_gil(
      [&] { return crc32(crc, info.ptr, static_cast<std::size_t>(info.size * info.itemsize)); });
}

void update_hash(Xxh3Stream& stream, const py::buffer& data) {
  const py::buffer_info info = data.request();
  without_gil(
      [&] { stream.update(info.ptr, static_cast<std::size_t>(info.size * info.itemsize)); });
}

}  // namespace
}  // namespace ptsave

PYBIND11_MODULE(_C, module) {
  using namespace ptsave;
  module.attr("VERSION") = PTSAVE_VERSION;
  register_errors(module);
  bind_writing(module);
  bind_reading(module);
  bind_pickling(module);
  bind_staging(module);
  bind_ranges(module);
  bind_appending(module);
  bind_statistics(module);
  bind_columns(module);
  bind_patches(module);
  module.def("crc32", &crc32_of_buffer, "data"_a, "crc"_a = 0);
  py::class_<Xxh3Stream>(module, "Xxh3")
      .def(py::init())
      .def("update", &update_hash, "data"_a)
      .def("hexdigest", [](const Xxh3Stream& self) { return self.digest().hex(); });
  module.def("payload_offset_after", &payload_offset_after, "header_offset"_a, "full_name"_a,
             "nbytes"_a, "alignment"_a);
}
