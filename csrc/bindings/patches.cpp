// ptsave._C.find_changes, check_patch, merge_patches, old_values, apply_changes and patched_copy.
#include "core/patches/patches.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/memory/pages.h"
#include "core/pipeline/pipeline.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

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

// New bytes that `write(address)` fills without the GIL.
template <typename Write>
py::bytes make_bytes(std::size_t nbytes, const Write& write) {
  auto bytes = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes)));
  if (!bytes) throw py::error_already_set();
  auto* const to = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr()));
  without_gil([&] { write(to); });
  return bytes;
}

py::bytes find_changes_of_tensors(const py::handle& before, const py::handle& after) {
  const at::Tensor a = unpack_measurable(before);
  const at::Tensor b = unpack_measurable(after);
  if (a.nbytes() != b.nbytes() || a.nbytes() > kMaxPatchedNbytes) {
    throw py::value_error("expected tensors of one size, below 4 GiB");
  }
  const auto found = without_gil([&] { return ByteChanges(memory_in(a), memory_in(b)); });
  return make_bytes(found.patch_nbytes(), [&](std::byte* to) { found.write_patch(to); });
}

// The bytes of `target` that the patch is to change.
py::bytes old_values(const py::bytes& bytes, const py::handle& target) {
  const at::Tensor tensor = unpack_measurable(target);
  const Patch patch(bytes_in(bytes));
  return make_bytes(patch.count(), [&](std::byte* to) { patch.read(memory_in(tensor), to); });
}

// The patch that has the effect of two patches, which `check_patch` has accepted.
py::bytes merge_patches(const py::bytes& older, const py::bytes& newer) {
  const Patch first(bytes_in(older));
  const Patch second(bytes_in(newer));
  const std::size_t nbytes = without_gil([&] { return first.merged_nbytes(second); });
  return make_bytes(nbytes, [&](std::byte* to) { first.write_merged(second, {to, nbytes}); });
}

void check_patch(const py::bytes& bytes, std::uint64_t nbytes) {
  const Patch patch(bytes_in(bytes));
  without_gil([&] { patch.check(nbytes); });
}

// Makes the pages of a target writable before a patch changes nearly all of them: in a mapped file,
// each page would fault, which takes twice as long.  A system before Linux 5.14 refuses, and the
// pages fault later.
void populate(std::span<std::byte> target) {
  const auto begin = reinterpret_cast<std::uintptr_t>(target.data());
  const PageRange pages = pages_covering(begin, begin + target.size(), page_nbytes());
  static_cast<void>(
      ::madvise(reinterpret_cast<void*>(pages.begin), pages.nbytes(), MADV_POPULATE_WRITE));
}

// Applies changes (bytes, target, is_whole): a patch of the target, or all of its new bytes. Signal
// handlers run afterwards, so that no target stays half changed.
void apply_changes(const std::vector<std::tuple<py::bytes, py::object, bool>>& changes,
                   std::size_t n_threads) {
  struct Work {
    std::optional<Patch> patch;
    std::span<const std::byte> whole;
    std::span<std::byte> target;
  };
  std::vector<Work> work;
  work.reserve(changes.size());
  for (const auto& [bytes, object, is_whole] : changes) {
    const std::span<std::byte> target = writable_memory_in(unpack_measurable(object));
    if (!is_whole) {
      work.push_back({Patch(bytes_in(bytes)), {}, target});
    } else if (bytes_in(bytes).size() == target.size()) {
      work.push_back({std::nullopt, bytes_in(bytes), target});
    } else {
      throw py::value_error("expected as many bytes as in the target");
    }
  }
  without_gil([&] {
    const auto apply = [&](std::size_t i) {
      const Work& each = work[i];
      if (each.patch.has_value()) {
        if (each.patch->count() >= each.target.size() / page_nbytes() + 1) populate(each.target);
        each.patch->apply(0, each.target);
      } else {
        std::ranges::copy(each.whole, each.target.begin());
      }
    };
    run_chunks(work.size(), n_threads, apply, [] {});
  });
}

// Copies the bytes of `source` from `begin` on to `target`, and applies steps (bytes, is_xor) to
// the copy, in order.  The bytes are a patch of the source, or are combined with the target's by
// xor.
void patched_copy(const py::handle& source, std::uint64_t begin, const py::handle& target,
                  const std::vector<std::pair<py::buffer, bool>>& steps) {
  const at::Tensor from = unpack_measurable(source);
  const std::span<std::byte> to = writable_memory_in(unpack_measurable(target));
  if (begin > from.nbytes() || to.size() > from.nbytes() - begin) {
    throw py::value_error("expected a range of the source");
  }
  std::vector<py::buffer_info> buffers;
  std::vector<std::pair<std::span<const std::byte>, std::optional<Patch>>> work;
  for (const auto& [bytes, is_xor] : steps) {
    const py::buffer_info& info = buffers.emplace_back(bytes.request());
    const std::span<const std::byte> memory(static_cast<const std::byte*>(info.ptr),
                                            static_cast<std::size_t>(info.size * info.itemsize));
    if (is_xor && memory.size() != to.size()) {
      throw py::value_error("expected as many bytes as in the target");
    }
    work.emplace_back(memory, is_xor ? std::nullopt : std::optional(Patch(memory)));
  }
  without_gil([&] {
    std::ranges::copy(memory_in(from).subspan(begin, to.size()), to.begin());
    for (const auto& [memory, patch] : work) {
      if (patch.has_value()) {
        patch->apply(begin, to);
      } else {
        std::ranges::transform(to, memory, to.begin(), std::bit_xor());
      }
    }
  });
}

}  // namespace

void bind_patches(py::module_& module) {
  module.attr("MAX_PATCHED_NBYTES") = kMaxPatchedNbytes;
  module.def("find_changes", &find_changes_of_tensors, "before"_a, "after"_a);
  module.def("old_values", &old_values, "patch"_a, "target"_a);
  module.def("merge_patches", &merge_patches, "older"_a, "newer"_a);
  module.def("check_patch", &check_patch, "patch"_a, "nbytes"_a);
  module.def("apply_changes", &apply_changes, "changes"_a, py::kw_only(), "n_threads"_a);
  module.def("patched_copy", &patched_copy, "source"_a, "begin"_a, "target"_a, "steps"_a);
}

}  // namespace ptsave
