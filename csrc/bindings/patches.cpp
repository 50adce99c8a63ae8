// ptsave._C.find_changes, check_patch, apply_patches, patched_copy and xor_bytes.
#include "core/patches/patches.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "core/pipeline/pipeline.h"

namespace ptsave {
namespace {

std::span<const std::byte> bytes_in(const py::bytes& object) {
  const auto text = static_cast<std::string_view>(object);
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::span<const std::byte> memory_in(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

std::span<std::byte> writable_memory_in(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

py::bytes find_changes_of_tensors(const py::handle& before, const py::handle& after) {
  const at::Tensor a = unpack_measurable(before);
  const at::Tensor b = unpack_measurable(after);
  if (a.nbytes() != b.nbytes() || a.nbytes() > kMaxPatchedNbytes) {
    throw py::value_error("expected tensors of one size, below 4 GiB");
  }
  const auto found = without_gil([&] { return ByteChanges(memory_in(a), memory_in(b)); });
  const auto nbytes = static_cast<Py_ssize_t>(found.patch_nbytes());
  auto patch = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, nbytes));
  if (!patch) throw py::error_already_set();
  auto* const to = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(patch.ptr()));
  without_gil([&] { found.write_patch(to); });
  return patch;
}

void check_patch(const py::bytes& bytes, std::uint64_t nbytes) {
  const Patch patch(bytes_in(bytes));
  without_gil([&] { patch.check(nbytes); });
}

// Signal handlers run after all patches are applied, so that no target stays half changed.
void apply_patches(const std::vector<std::pair<py::bytes, py::object>>& patches,
                   std::size_t n_threads) {
  std::vector<std::pair<Patch, std::span<std::byte>>> work;
  work.reserve(patches.size());
  for (const auto& [patch, target] : patches) {
    work.emplace_back(Patch(bytes_in(patch)), writable_memory_in(unpack_measurable(target)));
  }
  without_gil([&] {
    run_chunks(
        work.size(), n_threads, [&](std::size_t i) { work[i].first.apply(0, work[i].second); },
        [] {});
  });
}

// Copies the bytes of `source` from `begin` on to `target`, and applies patches of `source` to the
// copy.
void patched_copy(const py::handle& source, std::uint64_t begin, const py::handle& target,
                  const std::vector<py::bytes>& patches) {
  const at::Tensor from = unpack_measurable(source);
  const std::span<std::byte> to = writable_memory_in(unpack_measurable(target));
  if (begin > from.nbytes() || to.size() > from.nbytes() - begin) {
    throw py::value_error("expected a range of the source");
  }
  std::vector<Patch> changes;
  for (const py::bytes& patch : patches) changes.emplace_back(bytes_in(patch));
  without_gil([&] {
    if (!to.empty()) std::memcpy(to.data(), memory_in(from).data() + begin, to.size());
    for (const Patch& patch : changes) patch.apply(begin, to);
  });
}

void xor_bytes(const py::handle& target, const py::bytes& other) {
  const std::span<std::byte> to = writable_memory_in(unpack_measurable(target));
  const std::span<const std::byte> from = bytes_in(other);
  if (to.size() != from.size()) throw py::value_error("expected as many bytes as in the target");
  without_gil([&] {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] ^= from[i];
  });
}

}  // namespace

void bind_patches(py::module_& module) {
  module.attr("MAX_PATCHED_NBYTES") = kMaxPatchedNbytes;
  module.def("find_changes", &find_changes_of_tensors, "before"_a, "after"_a);
  module.def("check_patch", &check_patch, "patch"_a, "nbytes"_a);
  module.def("apply_patches", &apply_patches, "patches"_a, py::kw_only(), "n_threads"_a);
  module.def("patched_copy", &patched_copy, "source"_a, "begin"_a, "target"_a, "patches"_a);
  module.def("xor_bytes", &xor_bytes, "target"_a, "other"_a);
}

}  // namespace ptsave
