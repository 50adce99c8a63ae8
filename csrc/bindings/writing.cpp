// ptsave._C.WritePlan, PackedPlan, CheckedPlan, and PayloadSources: the files and memory of
// payloads.
#include <ATen/core/Tensor.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "core/io/file.h"
#include "core/io/late_release.h"
#include "core/read/reader.h"
#include "core/write/file_plan.h"
#include "core/write/payloads.h"
#include "core/write/sharing.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/ranges.h"
#include "tensors/snapshot.h"

namespace ptsave {
namespace {

struct PayloadSources {
  SharedSources sources;
};

// A descriptor and a name, or the address, size and name of memory.  The caller keeps the
// descriptor; the memory must outlive the sources.
using SourceOfPython = std::variant<std::tuple<int, std::string>,
                                    std::tuple<std::uintptr_t, std::uint64_t, std::string>>;

PayloadSources open_sources(const std::vector<SourceOfPython>& items, bool direct) {
  std::vector<ByteSource> sources;
  sources.reserve(items.size());
  for (const SourceOfPython& item : items) {
    if (const auto* file = std::get_if<0>(&item)) {
      const auto& [fd, name] = *file;
      sources.emplace_back(File::reopen_for_reading(fd, name), 0, direct_reads(direct));
    } else {
      const auto& [address, nbytes, name] = std::get<1>(item);
      sources.emplace_back(reinterpret_cast<const std::byte*>(address), nbytes, name);
    }
  }
  return {std::make_shared<const std::vector<ByteSource>>(std::move(sources))};
}

// Parts of a payload: (begin in the payload, source, offset in the source), or empty for one range.
using PartsOfPython = std::vector<std::tuple<std::uint64_t, std::size_t, std::uint64_t>>;

// Throws std::invalid_argument for parts that are not in order.
std::vector<SourcePart> parts_of(const PartsOfPython& parts) {
  std::vector<SourcePart> result;
  result.reserve(parts.size());
  for (const auto& [begin, source, offset] : parts) {
    const bool is_in_order = result.empty() ? begin == 0 : begin > result.back().begin;
    if (!is_in_order) throw std::invalid_argument("parts of a payload are not in order");
    result.push_back({begin, source, offset});
  }
  return result;
}

// Calls write(poll) without the GIL.
template <typename Write>
void run_write(const FilePlan& plan, const py::object& callback, const Write& write) {
  const Poll poll = make_poll([&] { return plan.nbytes_written(); }, callback);
  without_gil([&] { write(poll); });
}

// Makes a sink that calls `poll`, and then, with the GIL, write(memoryview) for data or
// skip(nbytes) for a hole.  The sink runs on a thread inside without_gil().  The three arguments
// must outlive it.
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

// Binds the properties and methods of every FilePlan.
template <typename Plan>
void bind_file_plan(py::class_<Plan>& plan) {
  plan.def_property_readonly("nbytes", &Plan::nbytes)
      .def_property_readonly("has_holes", &Plan::has_holes)
      .def_property_readonly("is_sequential", &Plan::is_sequential)
      .def_property_readonly("is_pinned", &Plan::is_pinned)
      .def(
          "write_file",
          [](Plan& self, std::string path, std::string display, bool durable,
             const WriteOptions& options, const py::object& callback, Sharing* sharing) {
            const FilePlan::Replacement target{std::move(path), std::move(display), durable};
            run_write(self, callback,
                      [&](const Poll& poll) { self.write_file(target, options, poll, sharing); });
          },
          "path"_a, "display"_a, py::kw_only(), "durable"_a, "options"_a, "progress"_a,
          "sharing"_a = nullptr)
      .def(
          "write_in_place",
          [](Plan& self, const std::string& path, std::optional<int> scratch, bool durable,
             const WriteOptions& options, const py::object& callback) {
            run_write(self, callback, [&](const Poll& poll) {
              self.write_in_place(path, scratch, durable, options, poll);
            });
          },
          "path"_a, py::kw_only(), "scratch"_a, "durable"_a, "options"_a, "progress"_a)
      .def(
          "write_stream",
          [](Plan& self, const py::function& sink, const py::function& skip,
             const WriteOptions& options, const py::object& callback) {
            run_write(self, callback, [&](const Poll& poll) {
              self.write_stream(make_stream_sink(sink, skip, poll), options);
            });
          },
          "sink"_a, "skip"_a, py::kw_only(), "options"_a, "progress"_a);
}

// ---------------------------------------------------------------------------------- archives

// A payload is bytes, the address of memory, None for a hole, or a function.  The function makes
// the payload when it is needed and returns its address, which is valid until the next function is
// called.
using Payload = std::variant<py::bytes, std::uintptr_t, py::none, py::function>;
using Record = std::tuple<std::string, Payload, std::uint64_t>;
// A list of storages, on the CPU or on accelerators, stands for the records data/0, data/1, ...
using Records = std::vector<std::variant<Record, const StorageList*>>;

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

// Adds Python's records to the planned records, which then keep the payloads alive.
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
  AcceleratorSources on_accelerators_;
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
  plan.read_from(sources.sources, named);
}

std::vector<std::pair<std::string, std::uint32_t>> damaged_records(const ArchivePlan& plan) {
  std::vector<std::pair<std::string, std::uint32_t>> result;
  for (const auto& [record, crc] : plan.damaged()) {
    result.emplace_back(plan.record_name(record), crc);
  }
  return result;
}

void stage(ArchivePlan& plan, std::size_t n_threads, const py::object& callback) {
  const Poll poll = make_poll({}, callback);
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

// ------------------------------------------------------------------------ sharing with a base

// Python passes the hashes of one save on to the next.
struct KeptHashes {
  std::shared_ptr<const FileHashes> hashes;
};

std::unique_ptr<Sharing> make_sharing(const ArchivePlan& plan,
                                      const std::optional<std::pair<int, std::string>>& base,
                                      const KeptHashes* kept) {
  return without_gil([&] {
    if (!base) {
      auto sharing = std::make_unique<Sharing>(std::nullopt);
      plan.prepare(*sharing, {});
      return sharing;
    }
    const auto& [fd, name] = *base;
    const ArchiveReader archive(ByteSource(File::reopen_for_reading(fd, name), 0));
    auto sharing = std::make_unique<Sharing>(
        Sharing::Base{ByteSource(File::reopen_for_reading(fd, name), 0, DirectReads::kAlways),
                      kept != nullptr ? kept->hashes : nullptr});
    plan.prepare(*sharing, archive.index().records());
    return sharing;
  });
}

// ---------------------------------------------------------------------------- packed payloads

// nbytes, source, offset, CRC if known, parts.
using PackedPayload = std::tuple<std::uint64_t, std::size_t, std::uint64_t,
                                 std::optional<std::uint32_t>, PartsOfPython>;

std::unique_ptr<PackedPlan> make_packed_plan(std::string header, const PayloadSources& sources,
                                             const std::vector<PackedPayload>& payloads,
                                             std::optional<std::uint64_t> crcs_at) {
  std::vector<std::uint64_t> sizes;
  std::vector<SourcePayload> sourced;
  for (const auto& [nbytes, source, offset, crc, parts] : payloads) {
    sizes.push_back(nbytes);
    sourced.push_back({source, offset, crc, parts_of(parts)});
  }
  return std::make_unique<PackedPlan>(
      std::move(header), std::move(sizes),
      std::make_unique<SourcedPayloads>(sources.sources, std::move(sourced)), crcs_at);
}

std::unique_ptr<PackedPlan> make_plan_of_tensors(std::string header,
                                                 const std::vector<py::object>& tensors,
                                                 std::optional<std::uint64_t> crcs_at) {
  std::vector<std::uint64_t> sizes;
  AcceleratorSources sources;
  for (const py::object& object : tensors) {
    const at::Tensor& tensor = unpack_bytes_of(object);
    sources.emplace(sizes.size(),
                    AcceleratorSource{tensor.storage(), byte_offset(tensor), tensor.nbytes()});
    sizes.push_back(tensor.nbytes());
  }
  return std::make_unique<PackedPlan>(std::move(header), std::move(sizes),
                                      std::make_unique<AcceleratorPayloads>(std::move(sources)),
                                      crcs_at);
}

std::vector<std::pair<std::size_t, std::uint32_t>> damaged_payloads_of(const PackedPlan& plan) {
  std::vector<std::pair<std::size_t, std::uint32_t>> result;
  for (const auto& [payload, crc] : plan.damaged()) result.emplace_back(payload, crc);
  return result;
}

// ------------------------------------------------------------- pieces with checksums of blocks

// Offset in the file, and bytes, a contiguous tensor, or a SourcedPiece.
using PieceOfPython = std::pair<std::uint64_t, py::object>;
// nbytes, source, offset, parts.
using SourcedPiece = std::tuple<std::uint64_t, std::size_t, std::uint64_t, PartsOfPython>;

// Makes the staging for pieces in other files or on accelerators; null if there are no such pieces.
std::unique_ptr<PayloadStaging> staging_of(AcceleratorSources on_accelerators,
                                           std::vector<SourcePayload> sourced,
                                           const PayloadSources* sources) {
  if (!sourced.empty()) {
    if (sources == nullptr) throw py::type_error("expected the sources of pieces");
    if (!on_accelerators.empty()) throw py::type_error("expected no tensors on accelerators");
    return std::make_unique<SourcedPayloads>(sources->sources, std::move(sourced));
  }
  if (on_accelerators.empty()) return nullptr;
  return std::make_unique<AcceleratorPayloads>(std::move(on_accelerators));
}

// The caller must keep bytes and CPU tensors alive.
std::unique_ptr<CheckedPlan> make_checked_plan(const std::vector<PieceOfPython>& objects,
                                               const PayloadSources* sources) {
  std::vector<PlacedPiece> pieces;
  pieces.reserve(objects.size());
  AcceleratorSources on_accelerators;
  std::vector<SourcePayload> sourced;
  for (const auto& [offset, object] : objects) {
    if (PyTuple_Check(object.ptr())) {
      const auto [nbytes, source, source_offset, parts] = object.cast<SourcedPiece>();
      sourced.resize(pieces.size());
      sourced.push_back({source, source_offset, std::nullopt, parts_of(parts)});
      pieces.push_back({offset, nbytes, nullptr});
      continue;
    }
    if (PyBytes_Check(object.ptr())) {
      const auto nbytes = static_cast<std::uint64_t>(PyBytes_GET_SIZE(object.ptr()));
      const auto* data = reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(object.ptr()));
      pieces.push_back({offset, nbytes, data});
      continue;
    }
    const at::Tensor& tensor = unpack_bytes_of(object);
    const std::uint64_t nbytes = tensor.nbytes();
    if (tensor.is_cpu()) {
      pieces.push_back({offset, nbytes, static_cast<const std::byte*>(tensor.const_data_ptr())});
      if (nbytes > 0 && pieces.back().data == nullptr) {
        throw py::type_error("expected a tensor with memory");
      }
      continue;
    }
    on_accelerators.emplace(pieces.size(),
                            AcceleratorSource{tensor.storage(), byte_offset(tensor), nbytes});
    pieces.push_back({offset, nbytes, nullptr});
  }
  return std::make_unique<CheckedPlan>(
      std::move(pieces), staging_of(std::move(on_accelerators), std::move(sourced), sources));
}

py::bytes block_crcs_of(const CheckedPlan& plan) {
  const auto crcs = plan.block_crcs();
  return {reinterpret_cast<const char*>(crcs.data()), crcs.size_bytes()};
}

void bind_plans(py::module_& module) {
  const py::class_<KeptHashes> hashes(module, "FileHashes");
  py::class_<Sharing>(module, "Sharing")
      .def(py::init(&make_sharing), "plan"_a, "base"_a = std::nullopt, "hashes"_a = nullptr)
      .def_property_readonly("nbytes_shared", &Sharing::nbytes_shared)
      .def_property_readonly("hashed", [](const Sharing& self) -> py::object {
        if (!self.hashed()) return py::none();
        return py::make_tuple(py::tuple(py::cast(self.hashed()->identity)),
                              KeptHashes{self.hashed()->hashes});
      });
  py::class_<ArchivePlan> plan(module, "WritePlan");
  plan.def(py::init(&make_plan), "root"_a, "records"_a, "alignment"_a)
      .def("release", &ArchivePlan::release)
      .def("abandon", &ArchivePlan::abandon)
      .def(
          "follow", [](ArchivePlan& self, Snapshot& copies) { self.follow(copies.payloads()); },
          "copies"_a, py::keep_alive<1, 2>())
      .def("read_from", &read_from, "sources"_a, "payloads"_a)
      .def_property_readonly("payloads", &ArchivePlan::payload_places)
      .def_property_readonly("damaged", &damaged_records)
      .def(
          "begin_staging",
          [](ArchivePlan& self, const WriteOptions& options) {
            self.begin_staging(options.chunk_nbytes);
          },
          py::kw_only(), "options"_a)
      .def("stage", &stage, py::kw_only(), "n_threads"_a, "progress"_a)
      .def("write_descriptor", &write_descriptor, "fd"_a, "offset"_a, "name"_a, py::kw_only(),
           "durable"_a, "options"_a, "progress"_a)
      .def("write_memory", &write_memory, "target"_a, py::kw_only(), "options"_a, "progress"_a);
  bind_file_plan(plan);
  py::class_<PayloadSources>(module, "PayloadSources")
      .def(py::init(&open_sources), "items"_a, py::kw_only(), "direct"_a);
  py::class_<PackedPlan> packed(module, "PackedPlan");
  packed
      .def(py::init(&make_packed_plan), "header"_a, "sources"_a, "payloads"_a,
           "crcs_at"_a = std::nullopt)
      .def_static("of_tensors", &make_plan_of_tensors, "header"_a, "tensors"_a,
                  "crcs_at"_a = std::nullopt)
      .def(
          "follow", [](PackedPlan& self, Snapshot& copies) { self.follow(copies.payloads()); },
          "copies"_a, py::keep_alive<1, 2>())
      .def_property_readonly("damaged", &damaged_payloads_of);
  bind_file_plan(packed);
  py::class_<CheckedPlan> checked(module, "CheckedPlan");
  checked
      .def(py::init(&make_checked_plan), "pieces"_a, "sources"_a = nullptr, py::keep_alive<1, 2>())
      .def_property_readonly("block_crcs", &block_crcs_of);
  bind_file_plan(checked);
}

}  // namespace

void bind_writing(py::module_& module) {
  module.def(
      "can_stage",
      [](const py::handle& device) { return SideStreams::are_supported(unpack_device(device)); },
      "device"_a);
  module.def(
      "refuse_capture",
      [](const py::handle& device) { SideStreams::refuse_capture(unpack_device(device)); },
      "device"_a);
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
           py::kw_only(), "compute_crcs"_a, "n_threads"_a, "chunk_nbytes"_a, "payloads_are_still"_a,
           "max_pinned_nbytes"_a, "n_direct_threads"_a = 0, "direct_nbytes"_a = py::none(),
           "in_background"_a = false);
  bind_plans(module);
  module.def(
      "resolve_links",
      [](const std::string& path) -> std::optional<py::bytes> {
        const std::optional<std::string> target = without_gil([&] { return resolve_links(path); });
        return target ? std::optional<py::bytes>(*target) : std::nullopt;
      },
      "path"_a);
  module.def(
      "remove_file",
      [](const std::string& path) { return without_gil([&] { return remove_file(path); }); },
      "path"_a);
  module.def(
      "release_later", [](int fd) { without_gil([&] { release_later(Descriptor(fd)); }); }, "fd"_a);
  module.def("finish_releases", [] { without_gil([] { finish_releases(); }); });
  module.def(
      "remove_leftovers",
      [](const std::string& path) { without_gil([&] { remove_leftovers(path); }); }, "path"_a);
}

}  // namespace ptsave
