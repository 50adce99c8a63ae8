#include "tensors/restore.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/ranges.h"

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

namespace {

// Copies that are no reads into place have this many bytes, or one record, in memory at a time.
constexpr std::uint64_t kBatchNbytes = std::uint64_t{32} << 20;

// Whether a source may cross the bus unconverted, and be converted on the target's device.
bool crosses_as_it_is(const at::Tensor& source, const at::Tensor& target) {
  return source.defined() && source.is_cpu() && source.nbytes() > 0 &&
         SideStreams::are_supported(target.device()) &&
         convert_alike(source.scalar_type(), target.scalar_type()) && source.is_contiguous() &&
         !source.is_conj() && !source.is_neg();
}

// Sorts tensors' numbers by address, and keeps only the first of overlapping tensors.
void sort_apart(std::vector<std::size_t>& numbers, const std::vector<at::Tensor>& tensors) {
  const auto begin_of = [&](std::size_t i) {
    return static_cast<const std::byte*>(tensors[i].const_data_ptr());
  };
  std::ranges::sort(numbers, {}, begin_of);
  const std::byte* end = nullptr;
  std::erase_if(numbers, [&](std::size_t i) {
    const bool overlaps = end != nullptr && begin_of(i) < end;
    if (!overlaps) end = begin_of(i) + tensors[i].nbytes();
    return overlaps;
  });
}

// Moves sources that are converted on an accelerator there, unless they have few bytes.  They cross
// the bus together, in chunks of page-locked memory.
void move_sources(std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& targets,
                  const Restore::Options& options, const Poll& poll) {
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (crosses_as_it_is(sources[i], targets[i])) numbers.push_back(i);
  }
  sort_apart(numbers, sources);
  std::uint64_t nbytes = 0;
  for (const std::size_t i : numbers) nbytes += sources[i].nbytes();
  if (nbytes < kMinPinnedNbytes) return;
  std::vector<ToAccelerator> copies;
  copies.reserve(numbers.size());
  for (const std::size_t i : numbers) {
    const at::TensorOptions there = sources[i].options().device(targets[i].device());
    copies.push_back({sources[i], at::empty(sources[i].sizes(), there)});
  }
  copy_to_accelerators(copies, options.n_threads, options.max_pinned_nbytes, poll);
  for (std::size_t k = 0; k < numbers.size(); ++k) sources[numbers[k]] = copies[k].target;
}

}  // namespace

Restore::Restore(ArchiveReader& reader, StorageOf storage_of)
    : reader_(reader),
      storage_of_(std::move(storage_of)),
      is_filled_(reader.index().records().size()),
      has_changed_(reader.index().records().size()) {}

void Restore::add(at::Tensor target, const at::Tensor& source, std::optional<std::size_t> record) {
  copies_.emplace_back(std::move(target), source, record);
}

void Restore::add(const c10::Storage& target, std::size_t record) {
  copies_.emplace_back(bytes_of(target, 0, target.nbytes()), record);
}

std::vector<DamagedRecord> Restore::run(std::span<const std::size_t> records,
                                        const Options& options, const Poll& poll) {
  std::vector<bool> is_whole = is_filled_;
  for (const std::size_t record : records) is_whole.at(record) = true;
  const CopySteps steps = plan_copies(copies_, is_whole);
  std::vector<DamagedRecord> damaged = read_direct(steps, is_whole, options, poll);
  if (!damaged.empty()) return damaged;
  for (const CopySteps::Repeated& repeat : steps.repeated) {
    const at::NoGradGuard no_grad;
    copies_[repeat.copy].target.copy_(copies_[repeat.of].target);
  }
  damaged = copy_others(steps.others, options, poll);
  copies_.clear();
  return damaged;
}

Destination Restore::own_storage(std::size_t record) const {
  const std::uint64_t nbytes = reader_.index().records()[record].nbytes;
  return {record, 0, nbytes, static_cast<std::byte*>(storage_of_(record).mutable_data())};
}

std::vector<DamagedRecord> Restore::read_direct(const CopySteps& steps,
                                                const std::vector<bool>& is_whole,
                                                const Options& options, const Poll& poll) {
  std::vector<Destination> destinations = steps.destinations;
  for (std::size_t i = 0; i < is_whole.size(); ++i) {
    if (is_whole[i] && !is_filled_[i]) destinations.push_back(own_storage(i));
  }
  const auto note_changes = [&] {
    for (const std::size_t record : reader_.begun()) {
      // has_changed_ of an earlier run stays when the record's own storage is read.
      if (!is_whole[record]) has_changed_[record] = true;
    }
    for (const std::size_t i : steps.direct)
      copies_[i].target.unsafeGetTensorImpl()->bump_version();
  };
  try {
    std::vector<DamagedRecord> damaged = fill(destinations, options, poll);
    note_changes();
    if (damaged.empty()) is_filled_ = is_whole;
    return damaged;
  } catch (...) {
    note_changes();
    throw;
  }
}

std::vector<DamagedRecord> Restore::fill(std::vector<Destination> destinations,
                                         const Options& options, const Poll& poll) {
  if (destinations.empty()) return {};
  const std::size_t max_leases =
      AcceleratorUnstager::n_leases(options.n_threads, options.max_pinned_nbytes / kMaxChunkNbytes);
  const std::unique_ptr<Unstager> unstager = unstager_for(destinations, max_leases);
  if (unstager == nullptr) {
    return reader_.fill(destinations, options.n_threads, options.verify, poll);
  }
  // Each worker holds a lease while it reads.
  const std::size_t n_threads = std::min(options.n_threads, max_leases);
  std::vector<DamagedRecord> damaged =
      reader_.fill(destinations, n_threads, options.verify, poll, unstager.get());
  unstager->drain();
  return damaged;
}

// An unstager for the destinations on accelerators, which it numbers again; null without any.
std::unique_ptr<Unstager> Restore::unstager_for(std::vector<Destination>& destinations,
                                                std::size_t max_leases) const {
  std::vector<at::Tensor> targets;
  for (Destination& destination : destinations) {
    if (!destination.target) continue;
    const at::Tensor& target = copies_[*destination.target].target;
    destination.target = targets.size();
    targets.push_back(bytes_of(target, 0, destination.nbytes));
  }
  if (targets.empty()) return nullptr;
  return std::make_unique<AcceleratorUnstager>(std::move(targets), kMaxChunkNbytes, max_leases);
}

std::vector<DamagedRecord> Restore::copy_others(const std::vector<std::size_t>& others,
                                                const Options& options, const Poll& poll) {
  std::vector<std::uint32_t> n_uses(is_filled_.size());
  for (const std::size_t i : others) {
    if (copies_[i].record) ++n_uses[*copies_[i].record];
  }
  const std::vector<bool> stays = is_filled_;
  for (auto begin = others.begin(); begin != others.end();) {
    std::vector<Destination> destinations;
    std::uint64_t nbytes = 0;
    auto end = begin;
    for (; end != others.end() && nbytes < kBatchNbytes; ++end) {
      const std::optional<std::size_t> record = copies_[*end].record;
      if (!record || is_filled_[*record]) {
        nbytes += copies_[*end].target.nbytes();
        continue;
      }
      destinations.push_back(own_storage(*record));
      nbytes += destinations.back().nbytes;
      is_filled_[*record] = true;
    }
    std::vector<DamagedRecord> damaged = fill(destinations, options, poll);
    if (!damaged.empty()) return damaged;
    std::vector<at::Tensor> sources = sources_of({begin, end}, options, poll);
    for (auto source = sources.begin(); begin != end; ++begin, ++source) {
      copy(copies_[*begin], std::exchange(*source, at::Tensor()), options, poll);
      const std::optional<std::size_t> record = copies_[*begin].record;
      if (record && --n_uses[*record] == 0 && !stays[*record]) {
        reader_.discard(*record);
        is_filled_[*record] = false;
      }
    }
  }
  return {};
}

// The sources of a batch's copies; undefined for copies without a record.
std::vector<at::Tensor> Restore::sources_of(std::span<const std::size_t> batch,
                                            const Options& options, const Poll& poll) const {
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> targets;
  for (const std::size_t i : batch) {
    const TensorCopy& copy = copies_[i];
    sources.push_back(copy.record ? copy.source_in(storage_of_(*copy.record)) : at::Tensor());
    targets.push_back(copy.target);
  }
  // A target in host memory may be a later copy's source; copy() then moves each source by itself.
  if (std::ranges::none_of(targets, [](const at::Tensor& target) { return target.is_cpu(); })) {
    move_sources(sources, targets, options, poll);
  }
  return sources;
}

void Restore::copy(const TensorCopy& copy, at::Tensor source, const Options& options,
                   const Poll& poll) {
  const at::NoGradGuard no_grad;
  if (!copy.record) {
    copy.target.copy_(copy.source);
    return;
  }
  std::vector<at::Tensor> sources{std::move(source)};
  move_sources(sources, {copy.target}, options, poll);
  has_changed_[*copy.record] = true;
  copy.target.copy_(sources.front());
}

std::vector<std::size_t> Restore::changed() const {
  std::vector<std::size_t> records;
  for (std::size_t i = 0; i < has_changed_.size(); ++i) {
    if (has_changed_[i]) records.push_back(i);
  }
  return records;
}

}  // namespace ptsave
