// ptsave._C.RangeFiles, map_range(), read_checked(), and functions for the memory of storages.
#include "tensors/ranges.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/crc/crc32.h"
#include "core/io/file.h"
#include "core/read/checked_read.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/dtypes.h"
#include "tensors/storage.h"

namespace ptsave {

const at::Tensor& unpack_tensor(const py::handle& tensor) {
  if (!THPVariable_Check(tensor.ptr())) throw py::type_error("expected a tensor");
  return THPVariable_Unpack(tensor.ptr());
}

const c10::Storage& unpack_storage(const py::handle& storage) {
  if (!THPStorage_Check(storage.ptr())) throw py::type_error("expected a torch.UntypedStorage");
  return THPStorage_Unpack(storage.ptr());
}

c10::ScalarType unpack_dtype(const py::handle& dtype) {
  if (!THPDtype_Check(dtype.ptr())) throw py::type_error("expected a torch.dtype");
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

c10::Device unpack_device(const py::handle& device) {
  if (!THPDevice_Check(device.ptr())) throw py::type_error("expected a torch.device");
  return reinterpret_cast<THPDevice*>(device.ptr())->device;
}

py::object wrap_tensor(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

const at::Tensor& unpack_bytes_of(const py::handle& object) {
  const at::Tensor& tensor = unpack_tensor(object);
  const bool in_reach = tensor.is_cpu() || SideStreams::are_supported(tensor.device());
  if (!in_reach || tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.is_conj() ||
      tensor.is_neg()) {
    throw py::type_error("expected a contiguous tensor in CPU memory or on an accelerator");
  }
  return tensor;
}

namespace {

std::shared_ptr<RangeFiles> open_range_files(const std::vector<std::pair<int, std::string>>& files,
                                             bool direct, std::size_t n_threads) {
  const auto start = std::make_shared<SharedStart>();
  std::vector<ByteSource> sources;
  sources.reserve(files.size());
  for (const auto& [fd, name] : files) {
    sources.emplace_back(File::reopen_for_reading(fd, name), 0, direct_reads(direct), start);
  }
  return std::make_shared<RangeFiles>(std::move(sources), n_threads);
}

// Returns (file, offset) of the ranges whose CRCs are not those of `crcs`, which is empty, or has
// an integer or None for each range.
std::vector<std::pair<std::size_t, std::uint64_t>> read_file_ranges(
    const std::shared_ptr<RangeFiles>& files,
    const std::vector<std::tuple<std::size_t, std::uint64_t, py::object>>& ranges,
    const std::vector<std::optional<std::uint32_t>>& crcs, std::size_t n_threads,
    std::size_t max_pinned_nbytes, std::uint64_t max_gap, const py::object& callback) {
  if (!crcs.empty() && crcs.size() != ranges.size()) {
    throw py::value_error("expected a checksum for each range");
  }
  std::vector<TensorRange> targets;
  targets.reserve(ranges.size());
  for (const auto& [file, offset, object] : ranges) {
    const auto crc = crcs.empty() ? std::nullopt : crcs[targets.size()];
    targets.push_back({file, offset, unpack_bytes_of(object), crc});
  }
  // Without the GIL, use only C++ objects.
  RangeTargets read(files, targets, max_gap);
  const Poll poll = make_poll([&] { return read.nbytes_read(); }, callback);
  without_gil([&] { read.run(n_threads, max_pinned_nbytes, poll); });
  std::vector<std::pair<std::size_t, std::uint64_t>> damaged;
  for (const FileRange& range : read.damaged()) damaged.emplace_back(range.file, range.offset);
  return damaged;
}

// Copies each source in CPU memory to its target, of the same size, on an accelerator.
void copy_to_devices(const std::vector<std::pair<py::object, py::object>>& pairs,
                     std::size_t n_threads, std::size_t max_pinned_nbytes) {
  std::vector<ToAccelerator> copies;
  copies.reserve(pairs.size());
  for (const auto& [source, target] : pairs) {
    const at::Tensor& from = unpack_bytes_of(source);
    const at::Tensor& to = unpack_bytes_of(target);
    if (!from.is_cpu() || from.nbytes() != to.nbytes()) {
      throw py::type_error("expected a source in CPU memory, as large as its target");
    }
    copies.push_back({from, to});
  }
  const Poll poll = make_poll();
  without_gil([&] { copy_to_accelerators(copies, n_threads, max_pinned_nbytes, poll); });
}

py::object map_file_range(int fd, std::string name, std::uint64_t offset, std::uint64_t nbytes) {
  const File file = File::duplicate(fd, std::move(name));
  return wrap_tensor(map_range(file, offset, nbytes));
}

// Maps the range if the page cache is known to hold all of it, so that access does not wait.
// Returns None otherwise.  Does not make the pages present: a caller that copies from them does
// that in parallel, in fewer steps.
py::object map_cached_file_range(int fd, std::string name, std::uint64_t offset,
                                 std::uint64_t nbytes) {
  const File file = File::duplicate(fd, std::move(name));
  if (!file.is_cached(offset, nbytes)) return py::none();
  return wrap_tensor(map_range(file, offset, nbytes));
}

bool is_remote_file(int fd, std::string name) {
  return File::duplicate(fd, std::move(name)).is_remote();
}

void detach_storage(const py::object& storage, const std::string& name) {
  const c10::Storage& mapped = unpack_storage(storage);
  without_gil([&] { detach_from_file(mapped, name); });
}

py::object new_huge_page_storage(std::uint64_t nbytes) {
  return py::reinterpret_steal<py::object>(THPStorage_Wrap(huge_page_storage(nbytes)));
}

// Returns None if the system refuses to lock memory.
py::object page_locked_storage(std::uint64_t nbytes, const py::object& object) {
  const c10::Device device = unpack_device(object);
  c10::Storage storage = without_gil([&] { return HostMemory(device).locked(nbytes); });
  if (!storage) {
    used_ordinary_memory().store(true);
    return py::none();
  }
  return py::reinterpret_steal<py::object>(THPStorage_Wrap(std::move(storage)));
}

// The number of references to the storage, including its Python object's.
std::size_t storage_use_count(const py::object& storage) {
  return unpack_storage(storage).use_count();
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
    const at::Tensor& target = unpack_tensor(object);
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

void bind_ranges(py::module_& module) {
  py::class_<RangeFiles, std::shared_ptr<RangeFiles>>(module, "RangeFiles")
      .def(py::init(&open_range_files), "files"_a, py::kw_only(), "direct"_a, "n_threads"_a)
      .def("read", &read_file_ranges, "ranges"_a, py::kw_only(),
           "crcs"_a = std::vector<std::optional<std::uint32_t>>{}, "n_threads"_a,
           "max_pinned_nbytes"_a, "max_gap"_a = RangeList::kMaxGapNbytes, "progress"_a);
  module.def("copy_to_devices", &copy_to_devices, "copies"_a, py::kw_only(), "n_threads"_a,
             "max_pinned_nbytes"_a);
  module.attr("MIN_PINNED_NBYTES") = kMinPinnedNbytes;
  module.def(
      "convert_alike",
      [](const py::handle& source, const py::handle& target) {
        return convert_alike(unpack_dtype(source), unpack_dtype(target));
      },
      "source"_a, "target"_a);
  module.def("map_range", &map_file_range, "fd"_a, "name"_a, py::kw_only(), "offset"_a, "nbytes"_a);
  module.def("map_cached_range", &map_cached_file_range, "fd"_a, "name"_a, py::kw_only(),
             "offset"_a, "nbytes"_a);
  module.def("is_remote", &is_remote_file, "fd"_a, "name"_a);
  module.def("detach_from_file", &detach_storage, "storage"_a, "name"_a);
  module.def("huge_page_storage", &new_huge_page_storage, "nbytes"_a);
  module.def("page_locked_storage", &page_locked_storage, "nbytes"_a, "device"_a);
  module.def("storage_use_count", &storage_use_count, "storage"_a);
  module.attr("CHECKED_BLOCK_NBYTES") = kCheckedBlockNbytes;
  module.def("crc_of_blocks", &crc_of_blocks, "table"_a);
  module.def("crc32_combine", &crc32_combine, "crc_a"_a, "crc_b"_a, "nbytes_b"_a);
  module.def(
      "crc32_of",
      [](const py::object& object, std::size_t n_threads) {
        const at::Tensor& tensor = unpack_bytes_of(object);
        if (!tensor.is_cpu()) throw py::type_error("expected a tensor in CPU memory");
        const std::span<const std::byte> memory = memory_of(tensor);
        const Poll poll = make_poll();
        return without_gil([&] { return crc32_of(memory, n_threads, poll); });
      },
      "tensor"_a, py::kw_only(), "n_threads"_a);
  module.def("read_checked", &read_checked, "files"_a, "boxes"_a, "tables"_a, py::kw_only(),
             "n_threads"_a, "max_gap"_a, "progress"_a);
}

}  // namespace ptsave
