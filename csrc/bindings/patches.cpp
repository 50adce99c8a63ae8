// ptsave._C.find_changes, check_patch, merge_patches, inverse, apply_changes and patched_copy.
#include "core/patches/patches.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
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

// The memory of bytes or of a tensor.
std::span<const std::byte> memory_in(const py::handle& object) {
  if (py::isinstance<py::bytes>(object)) {
    const auto text = static_cast<std::string_view>(py::reinterpret_borrow<py::bytes>(object));
    return std::as_bytes(std::span(text.data(), text.size()));
  }
  const at::Tensor tensor = unpack_measurable(object);
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

std::span<std::byte> writable_memory_in(const py::handle& object) {
  const at::Tensor tensor = unpack_measurable(object);
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// A new tensor that `write(address)` fills without the GIL.
template <typename Write>
py::object make_bytes(std::size_t nbytes, const Write& write) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(nbytes)}, at::kByte);
  auto* const to = static_cast<std::byte*>(tensor.mutable_data_ptr());
  without_gil([&] { write(to); });
  return wrap_tensor(std::move(tensor));
}

py::object find_changes(const py::handle& before, const py::handle& after, Xxh3Stream* digest) {
  const auto a = memory_in(before);
  const auto b = memory_in(after);
  if (a.size() != b.size() || a.size() > kMaxPatchedNbytes) {
    throw py::value_error("expected tensors of one size, below 4 GiB");
  }
  const auto found = without_gil([&] { return ByteChanges(a, b, digest); });
  return make_bytes(found.patch_nbytes(), [&](std::byte* to) { found.write_patch(to); });
}

py::object inverse(const py::handle& data, const py::handle& source) {
  const auto change = memory_in(data);
  const auto old = memory_in(source);
  return make_bytes(change.size(), [&](std::byte* to) {
    if (change.size() == old.size()) {
      std::ranges::copy(old, to);
    } else {
      Patch(change).write_inverse(old, to);
    }
  });
}

py::object merge_patches(const py::handle& older, const py::handle& newer) {
  const Patch first(memory_in(older));
  const Patch second(memory_in(newer));
  const std::size_t nbytes = without_gil([&] { return first.merged_nbytes(second); });
  return make_bytes(nbytes, [&](std::byte* to) { first.write_merged(second, {to, nbytes}); });
}

void check_patch(const py::handle& bytes, std::uint64_t nbytes) {
  const Patch patch(memory_in(bytes));
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

// A patch of a target, or contents of its size.
struct Change {
  std::span<const std::byte> data;
  std::span<std::byte> target;
  Xxh3Stream* digest;  // takes the new bytes, unless it is null
  std::optional<Patch> patch;

  void make() const {
    if (patch.has_value() && patch->count() >= target.size() / page_nbytes() + 1) populate(target);
    std::size_t i = 0;
    for (std::size_t at = 0; at < target.size(); at += kHashedPieceNbytes) {
      const auto piece = target.subspan(at, std::min(kHashedPieceNbytes, target.size() - at));
      if (patch.has_value()) {
        i = patch->apply(i, at, piece);
      } else {
        std::ranges::copy(data.subspan(at, piece.size()), piece.begin());
      }
      if (digest != nullptr) digest->update(piece.data(), piece.size());
    }
  }
};

// Makes changes.  Signal handlers run afterwards, so that no target stays half changed.
void apply_changes(const std::vector<std::tuple<py::object, py::object, Xxh3Stream*>>& changes,
                   std::size_t n_threads) {
  std::vector<Change> work;
  work.reserve(changes.size());
  for (const auto& [object, target, digest] : changes) {
    work.push_back({memory_in(object), writable_memory_in(target), digest, std::nullopt});
    Change& each = work.back();
    if (each.data.size() != each.target.size()) each.patch.emplace(each.data);
  }
  without_gil(
      [&] { run_chunks(work.size(), n_threads, [&](std::size_t i) { work[i].make(); }, [] {}); });
}

// Copies the bytes of `source` from `begin` on to `target`, and applies steps (bytes, is_xor) to
// the copy, in order.  The bytes are a patch of the source, or are combined with the target's by
// xor.
void patched_copy(const py::handle& source, std::uint64_t begin, const py::handle& target,
                  const std::vector<std::pair<py::object, bool>>& steps) {
  const std::span<const std::byte> from = memory_in(source);
  const std::span<std::byte> to = writable_memory_in(target);
  if (begin > from.size() || to.size() > from.size() - begin) {
    throw py::value_error("expected a range of the source");
  }
  std::vector<std::pair<std::span<const std::byte>, std::optional<Patch>>> work;
  for (const auto& [bytes, is_xor] : steps) {
    const auto memory = memory_in(bytes);
    if (is_xor && memory.size() != to.size()) {
      throw py::value_error("expected as many bytes as in the target");
    }
    work.emplace_back(memory, is_xor ? std::nullopt : std::optional(Patch(memory)));
  }
  without_gil([&] {
    std::ranges::copy(from.subspan(begin, to.size()), to.begin());
    for (const auto& [memory, patch] : work) {
      if (patch.has_value()) {
        patch->apply(patch->find(begin), begin, to);
      } else {
        std::ranges::transform(to, memory, to.begin(), std::bit_xor());
      }
    }
  });
}

}  // namespace

void bind_patches(py::module_& module) {
  module.attr("MAX_PATCHED_NBYTES") = kMaxPatchedNbytes;
  module.def("find_changes", &find_changes, "before"_a, "after"_a, "digest"_a = py::none());
  module.def("inverse", &inverse, "data"_a, "source"_a);
  module.def("merge_patches", &merge_patches, "older"_a, "newer"_a);
  module.def("check_patch", &check_patch, "patch"_a, "nbytes"_a);
  module.def("apply_changes", &apply_changes, "changes"_a, py::kw_only(), "n_threads"_a);
  module.def("patched_copy", &patched_copy, "source"_a, "begin"_a, "target"_a, "steps"_a);
}

}  // namespace ptsave
