// The methods that all plans of ptsave._C share, and the sources of payloads.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/gil.h"
#include "bindings/stream_sink.h"
#include "core/write/file_plan.h"
#include "core/write/payloads.h"

namespace ptsave {

// ptsave._C.PayloadSources.
class PayloadSources {
 public:
  // A descriptor and a name, or the address, size and name of memory.  The descriptor stays the
  // caller's; the memory must outlive this object.
  using Item = std::variant<std::tuple<int, std::string>,
                            std::tuple<std::uintptr_t, std::uint64_t, std::string>>;

  PayloadSources(const std::vector<Item>& items, bool direct);

  const SharedSources& get() const { return sources_; }

 private:
  SharedSources sources_;
};

// Parts of a payload: (begin in the payload, source, offset in the source), or empty for one range.
using PartsOfPython = std::vector<std::tuple<std::uint64_t, std::size_t, std::uint64_t>>;

// Throws std::invalid_argument for parts that are not in order.
std::vector<SourcePart> parts_of(const PartsOfPython& parts);

// Calls write(poll) without the GIL.
template <typename Write>
void run_write(const FilePlan& plan, const pybind11::object& callback, const Write& write) {
  const Poll poll = make_poll([&] { return plan.nbytes_written(); }, callback);
  without_gil([&] { write(poll); });
}

// Binds the properties and methods of every FilePlan.
template <typename Plan>
void bind_file_plan(pybind11::class_<Plan>& plan) {
  namespace py = pybind11;
  plan.def_property_readonly("nbytes", &Plan::nbytes)
      .def_property_readonly("has_holes", &Plan::has_holes)
      .def_property_readonly("is_sequential", &Plan::is_sequential)
      .def_property_readonly("is_pinned", &Plan::is_pinned)
      .def(
          "write_file",
          [](Plan& self, std::string path, std::string display, bool durable,
             const WriteOptions& options, const py::object& callback) {
            const FilePlan::Replacement target{std::move(path), std::move(display), durable};
            run_write(self, callback,
                      [&](const Poll& poll) { self.write_file(target, options, poll); });
          },
          py::arg("path"), py::arg("display"), py::kw_only(), py::arg("durable"),
          py::arg("options"), py::arg("progress"))
      .def(
          "write_in_place",
          [](Plan& self, const std::string& path, std::optional<int> scratch, bool durable,
             const WriteOptions& options, const py::object& callback) {
            run_write(self, callback, [&](const Poll& poll) {
              self.write_in_place(path, scratch, durable, options, poll);
            });
          },
          py::arg("path"), py::kw_only(), py::arg("scratch"), py::arg("durable"),
          py::arg("options"), py::arg("progress"))
      .def(
          "write_stream",
          [](Plan& self, const py::function& sink, const py::function& skip,
             const WriteOptions& options, const py::object& callback) {
            run_write(self, callback, [&](const Poll& poll) {
              self.write_stream(make_stream_sink(sink, skip, poll), options);
            });
          },
          py::arg("sink"), py::arg("skip"), py::kw_only(), py::arg("options"), py::arg("progress"));
}

}  // namespace ptsave
