#include "storage/copy_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "device/side_streams.h"

namespace ptsave {
namespace {

// A copy of a part of a record's bytes, without conversion.
struct ByteCopy {
  std::size_t number = 0;
  Destination destination;
};

// The range of addresses of a tensor's elements.
struct Span {
  std::size_t number = 0;
  c10::Device device;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

// Whether bytes can be read or copied into a tensor's memory.
bool has_memory(const at::Tensor& tensor) {
  return tensor.device().is_cpu() || SideStreams::are_supported(tensor.device());
}

std::optional<Span> span_of(const at::Tensor& tensor, std::size_t number) {
  if (tensor.numel() == 0 || !has_memory(tensor)) return std::nullopt;
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.mutable_data_ptr());
  return Span{number, tensor.device(), begin,
              begin + (static_cast<std::size_t>(last) + 1) * tensor.itemsize()};
}

bool is_bytes(const TensorCopy& copy) {
  const at::Tensor& target = copy.target;
  return copy.record && has_memory(target) && target.scalar_type() == copy.dtype &&
         target.is_conj() == copy.conj && target.is_neg() == copy.neg &&
         target.is_non_overlapping_and_dense() && target.strides() == at::IntArrayRef(copy.strides);
}

// The destination of a copy; its target has the copy's number.
Destination destination_of(const TensorCopy& copy, std::size_t number) {
  const auto itemsize = static_cast<std::uint64_t>(copy.target.itemsize());
  Destination destination{*copy.record, static_cast<std::uint64_t>(copy.offset) * itemsize,
                          static_cast<std::uint64_t>(copy.target.numel()) * itemsize,
                          static_cast<std::byte*>(copy.target.mutable_data_ptr())};
  if (!copy.target.device().is_cpu()) destination.target = number;
  return destination;
}

// Whether two destinations on one device are the same.
bool are_same(const Destination& a, const Destination& b) {
  return std::tie(a.record, a.offset, a.nbytes, a.place) ==
         std::tie(b.record, b.offset, b.nbytes, b.place);
}

// Finds the copies whose order matters: their targets overlap another copy's target, or a source
// that is no record (a hook may pass on a tensor of the model).  The order of copies of the same
// bytes to the same place (tied parameters) does not matter.
std::vector<bool> find_ordered(const std::vector<TensorCopy>& copies,
                               const std::vector<bool>& are_bytes) {
  std::vector<Span> spans;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (const auto span = span_of(copies[i].target, i)) spans.push_back(*span);
    if (copies[i].record) continue;
    if (const auto span = span_of(copies[i].source, i)) spans.push_back(*span);
  }
  std::ranges::sort(spans, {}, [](const Span& s) {
    return std::tuple(s.device.type(), s.device.index(), s.begin, s.number);
  });
  std::vector<bool> ordered(copies.size());
  const Span* widest = nullptr;
  for (const Span& span : spans) {
    if (widest != nullptr && widest->device != span.device) widest = nullptr;
    if (widest != nullptr && span.begin < widest->end) {
      const bool tied = are_bytes[span.number] && are_bytes[widest->number] &&
                        are_same(destination_of(copies[span.number], span.number),
                                 destination_of(copies[widest->number], widest->number));
      if (!tied) ordered[span.number] = ordered[widest->number] = true;
    }
    if (widest == nullptr || span.end > widest->end) widest = &span;
  }
  return ordered;
}

bool have_same_layout(const TensorCopy& a, const TensorCopy& b) {
  return a.dtype == b.dtype && a.sizes == b.sizes && a.strides == b.strides && a.conj == b.conj &&
         a.neg == b.neg;
}

// Keeps one of several copies of the same bytes.  The others are repeated from its target, or
// dropped if they have the same target.  Records with parts that overlap otherwise need a storage.
std::vector<CopySteps::Repeated> resolve_overlaps(const std::vector<TensorCopy>& copies,
                                                  std::vector<ByteCopy>& byte_copies,
                                                  std::vector<bool>& needs_storage) {
  std::ranges::stable_sort(byte_copies, {}, [](const ByteCopy& c) {
    return std::pair(c.destination.record, c.destination.offset);
  });
  std::vector<CopySteps::Repeated> repeated;
  std::vector<ByteCopy> kept;
  for (const ByteCopy& copy : byte_copies) {
    const Destination& to = copy.destination;
    if (kept.empty() || kept.back().destination.record != to.record ||
        kept.back().destination.offset + kept.back().destination.nbytes <= to.offset) {
      kept.push_back(copy);
      continue;
    }
    const ByteCopy& first = kept.back();
    if (copies[first.number].target.device() == copies[copy.number].target.device() &&
        are_same(first.destination, to)) {
      continue;
    }
    if (first.destination.offset == to.offset && first.destination.nbytes == to.nbytes &&
        have_same_layout(copies[first.number], copies[copy.number])) {
      repeated.push_back({copy.number, first.number});
    } else {
      needs_storage[to.record] = true;
    }
  }
  byte_copies = std::move(kept);
  return repeated;
}

}  // namespace

TensorCopy::TensorCopy(at::Tensor to, const at::Tensor& from, std::optional<std::size_t> of_record)
    : target(std::move(to)),
      record(of_record),
      source(of_record ? at::Tensor() : from),
      dtype(from.scalar_type()),
      offset(from.storage_offset()),
      sizes(from.sizes()),
      strides(from.strides()),
      conj(from.is_conj()),
      neg(from.is_neg()) {}

TensorCopy::TensorCopy(at::Tensor to, std::size_t of_record)
    : target(std::move(to)),
      record(of_record),
      dtype(c10::kByte),
      offset(0),
      sizes(target.sizes()),
      strides(target.strides()),
      conj(false),
      neg(false) {}

at::Tensor TensorCopy::source_in(const c10::Storage& storage) const {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  tensor._set_conj(conj);
  tensor._set_neg(neg);
  return tensor;
}

CopySteps plan_copies(const std::vector<TensorCopy>& copies, const std::vector<bool>& is_whole) {
  std::vector<bool> are_bytes(copies.size());
  for (std::size_t i = 0; i < copies.size(); ++i) {
    are_bytes[i] = is_bytes(copies[i]) && !is_whole[*copies[i].record];
  }
  const std::vector<bool> ordered = find_ordered(copies, are_bytes);
  // If one copy needs the complete record in memory, all copies of the record are made from there.
  std::vector<bool> needs_storage(is_whole.size());
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].record && (!are_bytes[i] || ordered[i])) needs_storage[*copies[i].record] = true;
  }
  std::vector<ByteCopy> byte_copies;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (are_bytes[i] && !ordered[i] && copies[i].target.numel() > 0) {
      byte_copies.push_back({i, destination_of(copies[i], i)});
    }
  }
  CopySteps steps;
  std::vector<CopySteps::Repeated> repeated = resolve_overlaps(copies, byte_copies, needs_storage);
  for (const ByteCopy& copy : byte_copies) {
    if (needs_storage[copy.destination.record]) continue;
    steps.destinations.push_back(copy.destination);
    steps.direct.push_back(copy.number);
  }
  for (const CopySteps::Repeated& repeat : repeated) {
    if (!needs_storage[*copies[repeat.copy].record]) steps.repeated.push_back(repeat);
  }
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const bool from_storage =
        !copies[i].record || is_whole[*copies[i].record] || needs_storage[*copies[i].record];
    if (from_storage && copies[i].target.numel() > 0) steps.others.push_back(i);
  }
  return steps;
}

}  // namespace ptsave
