// ptsave._C.CheckedPlan and read_checked(): files with a checksum for each block.
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/file_plans.h"
#include "bindings/gil.h"
#include "core/crc/crc32.h"
#include "core/read/checked_read.h"
#include "core/write/file_plan.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/ranges.h"

namespace py = pybind11;

namespace ptsave {
namespace {

// Offset in the file, and bytes, a contiguous tensor, or a SourcedPiece.
using PieceOfPython = std::pair<std::uint64_t, py::object>;
// nbytes, source, offset, parts.
using SourcedPiece = std::tuple<std::uint64_t, std::size_t, std::uint64_t, PartsOfPython>;

// The staging of pieces in other files, or of pieces on accelerators; null without either.
std::unique_ptr<PayloadStaging> staging_of(AcceleratorStager::Sources on_accelerators,
                                           std::vector<SourcePayload> sourced,
                                           const PayloadSources* sources) {
  if (!sourced.empty()) {
    if (sources == nullptr) throw py::type_error("expected the sources of pieces");
    if (!on_accelerators.empty()) throw py::type_error("expected no tensors on accelerators");
    return std::make_unique<SourcedPayloads>(sources->get(), std::move(sourced));
  }
  if (on_accelerators.empty()) return nullptr;
  return std::make_unique<AcceleratorPayloads>(std::move(on_accelerators));
}

// The caller must keep bytes and CPU tensors alive.
std::unique_ptr<CheckedPlan> make_checked_plan(const std::vector<PieceOfPython>& objects,
                                               const PayloadSources* sources) {
  std::vector<PlacedPiece> pieces;
  pieces.reserve(objects.size());
  AcceleratorStager::Sources on_accelerators;
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
    on_accelerators.emplace(
        pieces.size(), AcceleratorStager::Source{tensor.storage(), byte_offset(tensor), nbytes});
    pieces.push_back({offset, nbytes, nullptr});
  }
  return std::make_unique<CheckedPlan>(
      std::move(pieces), staging_of(std::move(on_accelerators), std::move(sourced), sources));
}

py::bytes block_crcs_of(const CheckedPlan& plan) {
  const auto crcs = plan.block_crcs();
  return {reinterpret_cast<const char*>(crcs.data()), crcs.size_bytes()};
}

CheckedRead::Table table_of(const py::object& object) {
  if (object.is_none()) return {};
  const at::Tensor& tensor = unpack_bytes_of(object);
  if (!tensor.is_cpu() || tensor.nbytes() % sizeof(std::uint32_t) != 0) {
    throw py::type_error("expected a table in CPU memory");
  }
  return {static_cast<const std::uint32_t*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.nbytes() / sizeof(std::uint32_t))};
}

// The CRC of consecutive whole blocks, from the blocks' CRCs.
std::uint32_t crc_of_blocks(const py::object& object) {
  const CheckedRead::Table table = table_of(object);
  return without_gil([&] {
    std::uint32_t crc = 0;
    for (const std::uint32_t each : table) crc = crc32_combine(crc, each, kCheckedBlockNbytes);
    return crc;
  });
}

// File, offset, strides in bytes, target.
using BoxOfPython = std::tuple<std::size_t, std::uint64_t, std::vector<std::uint64_t>, py::object>;

std::vector<std::pair<std::size_t, std::uint64_t>> read_checked(
    const std::shared_ptr<RangeFiles>& files, const std::vector<BoxOfPython>& boxes,
    const std::vector<py::object>& tables, std::size_t n_threads, std::uint64_t max_gap,
    const py::object& callback) {
  std::vector<FileRange> ranges;
  for (const auto& [file, offset, strides, object] : boxes) {
    if (!THPVariable_Check(object.ptr())) throw py::type_error("expected a tensor");
    const at::Tensor& target = THPVariable_Unpack(object.ptr());
    if (!target.is_cpu() || target.layout() != at::kStrided || target.is_conj() ||
        target.is_neg()) {
      throw py::type_error("expected a strided tensor in CPU memory");
    }
    add_ranges({file, offset, strides, target}, ranges);
  }
  std::vector<CheckedRead::Table> views;
  views.reserve(tables.size());
  for (const py::object& table : tables) views.push_back(table_of(table));
  CheckedRead read(files, std::move(ranges), std::move(views), max_gap);
  const Poll poll = make_poll([&] { return read.nbytes_read(); }, callback);
  std::vector<std::pair<std::size_t, std::uint64_t>> damaged;
  for (const auto& [file, offset] : without_gil([&] { return read.run(n_threads, poll); })) {
    damaged.emplace_back(file, offset);
  }
  return damaged;
}

}  // namespace

void bind_checked(py::module_& module) {
  module.attr("CHECKED_BLOCK_NBYTES") = kCheckedBlockNbytes;
  py::class_<CheckedPlan> plan(module, "CheckedPlan");
  plan.def(py::init(&make_checked_plan), py::arg("pieces"), py::arg("sources") = nullptr,
           py::keep_alive<1, 2>())
      .def_property_readonly("block_crcs", &block_crcs_of);
  bind_file_plan(plan);
  module.def("crc_of_blocks", &crc_of_blocks, py::arg("table"));
  module.def("crc32_combine", &crc32_combine, py::arg("crc_a"), py::arg("crc_b"),
             py::arg("nbytes_b"));
  module.def("read_checked", &read_checked, py::arg("files"), py::arg("boxes"), py::arg("tables"),
             py::kw_only(), py::arg("n_threads"), py::arg("max_gap"), py::arg("progress"));
}

}  // namespace ptsave
