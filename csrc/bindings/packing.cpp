// ptsave._C.PackedPlan, and PayloadSources: the files and memory of its payloads.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/file_plans.h"
#include "core/write/file_plan.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/snapshot.h"

namespace py = pybind11;

namespace ptsave {
namespace {

struct OpenSource {
  DirectReads direct;

  ByteSource operator()(const std::tuple<int, std::string>& file) const {
    const auto& [fd, name] = file;
    return {File::reopen_for_reading(fd, name), 0, direct};
  }
  ByteSource operator()(
      const std::tuple<std::uintptr_t, std::uint64_t, std::string>& memory) const {
    const auto& [address, nbytes, name] = memory;
    return {reinterpret_cast<const std::byte*>(address), nbytes, name};
  }
};

// nbytes, source, offset, CRC if known, parts.
using PackedPayload = std::tuple<std::uint64_t, std::size_t, std::uint64_t,
                                 std::optional<std::uint32_t>, PartsOfPython>;

std::unique_ptr<PackedPlan> make_packed_plan(std::string header, const PayloadSources& sources,
                                             const std::vector<PackedPayload>& payloads) {
  std::vector<std::uint64_t> sizes;
  std::vector<SourcePayload> sourced;
  for (const auto& [nbytes, source, offset, crc, parts] : payloads) {
    sizes.push_back(nbytes);
    sourced.push_back({source, offset, crc, parts_of(parts)});
  }
  return std::make_unique<PackedPlan>(
      std::move(header), std::move(sizes),
      std::make_unique<SourcedPayloads>(sources.get(), std::move(sourced)));
}

std::unique_ptr<PackedPlan> make_plan_of_tensors(std::string header,
                                                 const std::vector<py::object>& tensors) {
  std::vector<std::uint64_t> sizes;
  AcceleratorStager::Sources sources;
  for (const py::object& object : tensors) {
    const at::Tensor& tensor = unpack_bytes_of(object);
    sources.emplace(sizes.size(), AcceleratorStager::Source{tensor.storage(), byte_offset(tensor),
                                                            tensor.nbytes()});
    sizes.push_back(tensor.nbytes());
  }
  return std::make_unique<PackedPlan>(std::move(header), std::move(sizes),
                                      std::make_unique<AcceleratorPayloads>(std::move(sources)));
}

std::vector<std::pair<std::size_t, std::uint32_t>> damaged_payloads_of(const PackedPlan& plan) {
  std::vector<std::pair<std::size_t, std::uint32_t>> result;
  for (const auto& [payload, crc] : plan.damaged()) result.emplace_back(payload, crc);
  return result;
}

}  // namespace

std::vector<SourcePart> parts_of(const PartsOfPython& parts) {
  std::vector<SourcePart> result;
  result.reserve(parts.size());
  for (const auto& [begin, source, offset] : parts) {
    const bool is_in_order = result.empty() ? begin == 0 : begin > result.back().begin;
    if (!is_in_order) throw std::invalid_argument("parts of a payload are not in its order");
    result.push_back({begin, source, offset});
  }
  return result;
}

PayloadSources::PayloadSources(const std::vector<Item>& items, bool direct) {
  const OpenSource open{direct_reads(direct)};
  std::vector<ByteSource> sources;
  sources.reserve(items.size());
  for (const Item& item : items) sources.push_back(std::visit(open, item));
  sources_ = std::make_shared<const std::vector<ByteSource>>(std::move(sources));
}

void bind_packing(py::module_& module) {
  py::class_<PayloadSources>(module, "PayloadSources")
      .def(py::init<const std::vector<PayloadSources::Item>&, bool>(), py::arg("items"),
           py::kw_only(), py::arg("direct"));
  py::class_<PackedPlan> plan(module, "PackedPlan");
  plan.def(py::init(&make_packed_plan), py::arg("header"), py::arg("sources"), py::arg("payloads"))
      .def_static("of_tensors", &make_plan_of_tensors, py::arg("header"), py::arg("tensors"))
      .def(
          "follow", [](PackedPlan& self, Snapshot& copies) { self.follow(copies.payloads()); },
          py::arg("copies"), py::keep_alive<1, 2>())
      .def_property_readonly("damaged", &damaged_payloads_of);
  bind_file_plan(plan);
}

}  // namespace ptsave
