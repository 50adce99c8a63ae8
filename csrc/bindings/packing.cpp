// ptsave._C.PackedPlan and what its payloads come from.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/plan_options.h"
#include "bindings/sourced_payloads.h"
#include "bindings/stream_sink.h"
#include "core/file.h"
#include "core/packed_body.h"
#include "core/writer.h"

namespace py = pybind11;

namespace ptsave {
namespace {

// A header and payloads, to be written one behind the other.
class PackedPlan {
 public:
  // nbytes, source, offset, CRC if it is known.
  using Payload =
      std::tuple<std::uint64_t, std::size_t, std::uint64_t, std::optional<std::uint32_t>>;

  PackedPlan(std::string header, std::shared_ptr<PayloadSources> sources,
             const std::vector<Payload>& payloads)
      : header_(std::move(header)) {
    std::vector<SourcePayload> sourced;
    for (const auto& [payload_nbytes, source, offset, crc] : payloads) {
      nbytes_.push_back(payload_nbytes);
      sourced.push_back({source, offset, crc});
    }
    payloads_ = SourcedPayloads(std::move(sources), std::move(sourced));
  }

  std::uint64_t nbytes() const {
    return std::accumulate(nbytes_.begin(), nbytes_.end(), std::uint64_t{header_.size()});
  }
  std::vector<std::pair<std::size_t, std::uint32_t>> damaged() const {
    std::vector<std::pair<std::size_t, std::uint32_t>> result;
    for (const auto& [record, crc] : payloads_.damaged()) result.emplace_back(record, crc);
    return result;
  }

  void write_file(const std::string& path, const std::string& display, bool durable, bool direct,
                  const PlanOptions& options, const py::object& callback) {
    run(options, callback, [&](const WriteOptions& write, const Poll& poll) {
      AtomicFile target(path, display);
      File& file = target.file();
      file.preallocate(nbytes());
      if (direct && file.direct_io_alignment().supported()) {
        PackedBody body = body_of(write, direct_chunk_nbytes(file, write));
        write_direct(body, file, write, progress_, poll);
      } else {
        write_through_cache(file, write, poll);
      }
      target.commit(durable);
    });
  }

  void write_in_place(const std::string& path, std::optional<int> scratch, bool durable,
                      const PlanOptions& options, const py::object& callback) {
    run(options, callback, [&](const WriteOptions& write, const Poll& poll) {
      const auto write_to = [&](File& file) {
        file.preallocate(nbytes());
        write_through_cache(file, write, poll);
      };
      std::optional<File> first;
      if (scratch) first = File::duplicate(*scratch, path);
      overwrite(path, first ? &*first : nullptr, nbytes(), durable, write_to, poll);
    });
  }

  // Calls sink(memoryview); there are no holes to skip.
  void write_stream(const py::function& sink, const py::function& skip, const PlanOptions& options,
                    const py::object& callback) {
    run(options, callback, [&](const WriteOptions& write, const Poll& poll) {
      PackedBody body = body_of(write, write.chunk_nbytes);
      write_to_stream(body, make_stream_sink(sink, skip, poll), write, progress_);
    });
  }

 private:
  PackedBody body_of(const WriteOptions& options, std::size_t chunk_nbytes) const {
    return {header_, nbytes_, *options.stager, options.compute_crcs, chunk_nbytes};
  }

  void write_through_cache(File& file, const WriteOptions& options, const Poll& poll) {
    PackedBody body = body_of(options, options.chunk_nbytes);
    write_buffered(body, file, 0, options, progress_, poll);
  }

  template <typename Write>
  void run(const PlanOptions& options, const py::object& callback, const Write& write) {
    progress_ = 0;
    WriteOptions write_options = options;
    const std::unique_ptr<Stager> stager = payloads_.make_stager(write_options);
    const Poll poll = make_poll([this] { return progress_.load(); }, callback);
    without_gil([&] { write(write_options, poll); });
  }

  std::string header_;
  std::vector<std::uint64_t> nbytes_;
  SourcedPayloads payloads_;
  Progress progress_{0};
};

}  // namespace

void bind_packing(py::module_& module) {
  py::class_<PayloadSources, std::shared_ptr<PayloadSources>>(module, "PayloadSources")
      .def(py::init<const std::vector<PayloadSources::Item>&, bool>(), py::arg("items"),
           py::kw_only(), py::arg("direct"));
  py::class_<PackedPlan>(module, "PackedPlan")
      .def(py::init<std::string, std::shared_ptr<PayloadSources>,
                    const std::vector<PackedPlan::Payload>&>(),
           py::arg("header"), py::arg("sources"), py::arg("payloads"))
      .def_property_readonly("nbytes", &PackedPlan::nbytes)
      .def_property_readonly("has_holes", [](const PackedPlan&) { return false; })
      .def_property_readonly("is_sequential", [](const PackedPlan&) { return false; })
      .def_property_readonly("is_staged", [](const PackedPlan&) { return true; })
      .def_property_readonly("damaged", &PackedPlan::damaged)
      .def("write_file", &PackedPlan::write_file, py::arg("path"), py::arg("display"),
           py::kw_only(), py::arg("durable"), py::arg("direct"), py::arg("options"),
           py::arg("progress"))
      .def("write_in_place", &PackedPlan::write_in_place, py::arg("path"), py::kw_only(),
           py::arg("scratch"), py::arg("durable"), py::arg("options"), py::arg("progress"))
      .def("write_stream", &PackedPlan::write_stream, py::arg("sink"), py::arg("skip"),
           py::kw_only(), py::arg("options"), py::arg("progress"));
}

}  // namespace ptsave
