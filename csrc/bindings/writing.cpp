// ptsave._C.WritePlan.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/file_plans.h"
#include "bindings/gil.h"
#include "core/io/file.h"
#include "core/io/late_release.h"
#include "core/write/file_plan.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/snapshot.h"

namespace py = pybind11;

namespace ptsave {
namespace {

// A payload is bytes, the address of memory, None for a hole, or a function.  The function makes
// the payload when it is needed and returns its address, which is valid until the next function is
// called.
using Payload = std::variant<py::bytes, std::uintptr_t, py::none, py::function>;
using Record = std::tuple<std::string, Payload, std::uint64_t>;
// A list of storages, on the CPU or on accelerators, stands for the records data/0, data/1, ...
using Records = std::vector<std::variant<Record, const StorageList*>>;

// Calls a Python function that returns an address.
const std::byte* call_maker(const py::function& make) {
  const std::byte* address = nullptr;
  with_gil([&] {
    PyObject* const made = PyObject_CallNoArgs(make.ptr());
    if (made == nullptr) throw py::error_already_set();
    address = static_cast<const std::byte*>(PyLong_AsVoidPtr(made));
    Py_DECREF(made);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  });
  return address;
}

// Adds Python's records to the planned ones, which keep their payloads alive.
class RecordAdder {
 public:
  explicit RecordAdder(PlannedRecords& records) : records_(records) { records.keep(bytes_); }

  void operator()(const Record& record) {
    const auto& [name, payload, nbytes] = record;
    if (const auto* bytes = std::get_if<py::bytes>(&payload)) {
      bytes_->push_back(*bytes);
      records_.add(std::string(name), nbytes,
                   reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(bytes->ptr())));
    } else if (const auto* make = std::get_if<py::function>(&payload)) {
      records_.add_made(std::string(name), nbytes, [make = *make] { return call_maker(make); });
    } else {
      const auto* address = std::get_if<std::uintptr_t>(&payload);
      records_.add(std::string(name), nbytes,
                   reinterpret_cast<const std::byte*>(address ? *address : 0));
    }
  }
  void operator()(const StorageList* list) { add_storages(*list, records_, on_accelerators_); }

  std::unique_ptr<PayloadStaging> staging() {
    if (on_accelerators_.empty()) return nullptr;
    return std::make_unique<AcceleratorPayloads>(std::move(on_accelerators_));
  }

 private:
  PlannedRecords& records_;
  std::shared_ptr<std::vector<py::bytes>> bytes_ = std::make_shared<std::vector<py::bytes>>();
  AcceleratorStager::Sources on_accelerators_;
};

std::unique_ptr<ArchivePlan> make_plan(const std::string& root, const Records& records,
                                       std::uint64_t alignment) {
  PlannedRecords planned;
  RecordAdder add(planned);
  for (const auto& item : records) std::visit(add, item);
  return std::make_unique<ArchivePlan>(root, std::move(planned), alignment, add.staging());
}

// The record's name, the source, the offset in the source, the CRC if known, and the parts.
using Sourced = std::tuple<std::string, std::size_t, std::uint64_t, std::optional<std::uint32_t>,
                           PartsOfPython>;

void read_from(ArchivePlan& plan, const PayloadSources& sources,
               const std::vector<Sourced>& payloads) {
  std::vector<ArchivePlan::NamedSource> named;
  named.reserve(payloads.size());
  for (const auto& [record, source, offset, crc, parts] : payloads) {
    named.push_back({record, {source, offset, crc, parts_of(parts)}});
  }
  plan.read_from(sources.get(), named);
}

std::vector<std::pair<std::string, std::uint32_t>> damaged_records(const ArchivePlan& plan) {
  std::vector<std::pair<std::string, std::uint32_t>> result;
  for (const auto& [record, crc] : plan.damaged()) {
    result.emplace_back(plan.record_name(record), crc);
  }
  return result;
}

void stage(ArchivePlan& plan, std::size_t n_threads, const py::object& callback) {
  const Poll poll = make_poll([] { return std::uint64_t{0}; }, callback);
  without_gil([&] { plan.stage(n_threads, poll); });
}

void write_descriptor(ArchivePlan& plan, int fd, std::uint64_t offset, const std::string& name,
                      bool durable, const WriteOptions& options, const py::object& callback) {
  run_write(plan, callback, [&](const Poll& poll) {
    plan.write_descriptor(fd, offset, name, durable, options, poll);
  });
}

void write_memory(ArchivePlan& plan, const py::buffer& target, const WriteOptions& options,
                  const py::object& callback) {
  const py::buffer_info info = target.request(/*writable=*/true);
  const std::span memory(static_cast<std::byte*>(info.ptr),
                         static_cast<std::size_t>(info.size * info.itemsize));
  run_write(plan, callback, [&](const Poll& poll) { plan.write_memory(memory, options, poll); });
}

void bind_plan(py::module_& module) {
  py::class_<ArchivePlan> plan(module, "WritePlan");
  plan.def(py::init(&make_plan), py::arg("root"), py::arg("records"), py::arg("alignment"))
      .def("release", &ArchivePlan::release)
      .def("abandon", &ArchivePlan::abandon)
      .def(
          "follow", [](ArchivePlan& self, Snapshot& copies) { self.follow(copies.payloads()); },
          py::arg("copies"), py::keep_alive<1, 2>())
      .def("read_from", &read_from, py::arg("sources"), py::arg("payloads"))
      .def_property_readonly("damaged", &damaged_records)
      .def(
          "begin_staging",
          [](ArchivePlan& self, const WriteOptions& options) {
            self.begin_staging(options.chunk_nbytes);
          },
          py::kw_only(), py::arg("options"))
      .def("stage", &stage, py::kw_only(), py::arg("n_threads"), py::arg("progress"))
      .def("write_descriptor", &write_descriptor, py::arg("fd"), py::arg("offset"), py::arg("name"),
           py::kw_only(), py::arg("durable"), py::arg("options"), py::arg("progress"))
      .def("write_memory", &write_memory, py::arg("target"), py::kw_only(), py::arg("options"),
           py::arg("progress"));
  bind_file_plan(plan);
}

}  // namespace

void bind_writing(py::module_& module) {
  module.def(
      "can_stage",
      [](const py::handle& device) { return SideStreams::are_supported(unpack_device(device)); },
      py::arg("device"));
  py::class_<WriteOptions>(module, "WriteOptions")
      .def(py::init([](bool compute_crcs, std::size_t n_threads, std::size_t chunk_nbytes,
                       bool payloads_are_still, std::size_t max_pinned_nbytes,
                       std::size_t n_direct_threads, std::optional<std::uint64_t> direct_nbytes,
                       bool in_background) {
             return WriteOptions{
                 .compute_crcs = compute_crcs,
                 .n_threads = n_threads,
                 .chunk_nbytes = chunk_nbytes,
                 .payloads_are_still = payloads_are_still,
                 .n_direct_threads = n_direct_threads,
                 .direct_nbytes = direct_nbytes,
                 .max_pinned_nbytes = max_pinned_nbytes,
                 .priority = in_background ? Priority::kBackground : Priority::kOfCaller};
           }),
           py::kw_only(), py::arg("compute_crcs"), py::arg("n_threads"), py::arg("chunk_nbytes"),
           py::arg("payloads_are_still"), py::arg("max_pinned_nbytes"),
           py::arg("n_direct_threads") = 0, py::arg("direct_nbytes") = py::none(),
           py::arg("in_background") = false);
  bind_plan(module);
  module.def(
      "resolve_links",
      [](const std::string& path) -> std::optional<py::bytes> {
        const std::optional<std::string> target = without_gil([&] { return resolve_links(path); });
        return target ? std::optional<py::bytes>(*target) : std::nullopt;
      },
      py::arg("path"));
  module.def(
      "remove_file",
      [](const std::string& path) { return without_gil([&] { return remove_file(path); }); },
      py::arg("path"));
  module.def(
      "release_later", [](int fd) { without_gil([&] { release_later(Descriptor(fd)); }); },
      py::arg("fd"));
  module.def("finish_releases", [] { without_gil([] { finish_releases(); }); });
  module.def(
      "remove_leftovers",
      [](const std::string& path) { without_gil([&] { remove_leftovers(path); }); },
      py::arg("path"));
}

}  // namespace ptsave
