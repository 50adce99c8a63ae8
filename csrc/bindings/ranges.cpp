// ptsave._C.RangeFiles, map_range(), and functions for the memory of storages.
#include "tensors/ranges.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "core/io/file.h"
#include "device/side_streams.h"
#include "tensors/storage.h"

namespace py = pybind11;

namespace ptsave {
const at::Tensor& unpack_bytes_of(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("expected a tensor");
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
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

void read_file_ranges(const std::shared_ptr<RangeFiles>& files,
                      const std::vector<std::tuple<std::size_t, std::uint64_t, py::object>>& ranges,
                      std::size_t n_threads, std::size_t max_pinned_nbytes, std::uint64_t max_gap,
                      const py::object& callback) {
  std::vector<TensorRange> targets;
  targets.reserve(ranges.size());
  for (const auto& [file, offset, object] : ranges) {
    targets.push_back({file, offset, unpack_bytes_of(object)});
  }
  // Without the GIL, use only C++ objects.
  RangeTargets read(files, targets, max_gap);
  const Poll poll = make_poll([&] { return read.nbytes_read(); }, callback);
  without_gil([&] { read.run(n_threads, max_pinned_nbytes, poll); });
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
  const Poll poll = make_poll([] { return std::uint64_t{0}; }, py::none());
  without_gil([&] { copy_to_accelerators(copies, n_threads, max_pinned_nbytes, poll); });
}

bool dtypes_convert_alike(const py::object& from, const py::object& to) {
  if (!THPDtype_Check(from.ptr()) || !THPDtype_Check(to.ptr())) {
    throw py::type_error("expected two of torch.dtype");
  }
  return convert_alike(reinterpret_cast<THPDtype*>(from.ptr())->scalar_type,
                       reinterpret_cast<THPDtype*>(to.ptr())->scalar_type);
}

py::object map_file_range(int fd, std::string name, std::uint64_t offset, std::uint64_t nbytes) {
  const File file = File::duplicate(fd, std::move(name));
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(map_range(file, offset, nbytes)));
}

bool is_remote_file(int fd, std::string name) {
  return File::duplicate(fd, std::move(name)).is_remote();
}

py::object map_cached_file_range(int fd, std::string name, std::uint64_t offset,
                                 std::uint64_t nbytes) {
  const File file = File::duplicate(fd, std::move(name));
  std::optional<at::Tensor> tensor = map_cached_range(file, offset, nbytes);
  if (!tensor) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(*std::move(tensor)));
}

const c10::Storage& unpack_storage(const py::object& storage) {
  if (!THPStorage_Check(storage.ptr())) throw py::type_error("expected a torch.UntypedStorage");
  return THPStorage_Unpack(storage.ptr());
}

void detach_storage(const py::object& storage, const std::string& name) {
  const c10::Storage& mapped = unpack_storage(storage);
  without_gil([&] { detach_from_file(mapped, name); });
}

py::object new_huge_page_storage(std::uint64_t nbytes) {
  return py::reinterpret_steal<py::object>(THPStorage_Wrap(huge_page_storage(nbytes)));
}

// The number of references to the storage, including its Python object's.
std::size_t storage_use_count(const py::object& storage) {
  return unpack_storage(storage).use_count();
}

}  // namespace

void bind_ranges(py::module_& module) {
  py::class_<RangeFiles, std::shared_ptr<RangeFiles>>(module, "RangeFiles")
      .def(py::init(&open_range_files), py::arg("files"), py::kw_only(), py::arg("direct"),
           py::arg("n_threads"))
      .def("read", &read_file_ranges, py::arg("ranges"), py::kw_only(), py::arg("n_threads"),
           py::arg("max_pinned_nbytes"), py::arg("max_gap") = RangeList::kMaxGapNbytes,
           py::arg("progress"));
  module.def("copy_to_devices", &copy_to_devices, py::arg("copies"), py::kw_only(),
             py::arg("n_threads"), py::arg("max_pinned_nbytes"));
  module.attr("MIN_PINNED_NBYTES") = kMinPinnedNbytes;
  module.def("convert_alike", &dtypes_convert_alike, py::arg("source"), py::arg("target"));
  module.def("map_range", &map_file_range, py::arg("fd"), py::arg("name"), py::kw_only(),
             py::arg("offset"), py::arg("nbytes"));
  module.def("map_cached_range", &map_cached_file_range, py::arg("fd"), py::arg("name"),
             py::kw_only(), py::arg("offset"), py::arg("nbytes"));
  module.def("is_remote", &is_remote_file, py::arg("fd"), py::arg("name"));
  module.def("detach_from_file", &detach_storage, py::arg("storage"), py::arg("name"));
  module.def("huge_page_storage", &new_huge_page_storage, py::arg("nbytes"));
  module.def("storage_use_count", &storage_use_count, py::arg("storage"));
}

}  // namespace ptsave
