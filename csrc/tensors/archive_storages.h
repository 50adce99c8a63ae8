// The storages of one archive during its load: records, devices, references, and the planned copies
// that put its bytes into existing tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/read/reader.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/dtypes.h"
#include "tensors/ranges.h"
#include "tensors/storage.h"

namespace ptsave {

// A planned target.copy_(source).  The source is a tensor with values, or a view of a record.  A
// view is described by its place in the record's storage, because a reference to the storage would
// keep its memory.
struct TensorCopy {
  TensorCopy(at::Tensor to, const at::Tensor& from, std::optional<std::size_t> of_record)
      : target(std::move(to)),
        record(of_record),
        source(of_record ? at::Tensor() : from),
        dtype(from.scalar_type()),
        offset(from.storage_offset()),
        sizes(from.sizes()),
        strides(from.strides()),
        conj(from.is_conj()),
        neg(from.is_neg()) {}

  // The source, as a view of its record's storage.
  at::Tensor source_in(const c10::Storage& storage) const {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    tensor._set_conj(conj);
    tensor._set_neg(neg);
    return tensor;
  }

  at::Tensor target;
  std::optional<std::size_t> record;
  at::Tensor source;  // undefined if there is a record
  c10::ScalarType dtype;
  std::int64_t offset;  // in elements
  at::DimVector sizes;
  at::DimVector strides;
  bool conj;
  bool neg;
};

// The steps for a list of copies, which are identified by their indices.  First the destinations
// are read, then repeated copies are made from other copies' targets, then all remaining copies are
// made in their order.
struct CopySteps {
  struct Repeated {
    std::size_t copy;
    std::size_t of;
  };

  std::vector<Destination> destinations;  // on accelerators, target is the copy's number
  std::vector<std::size_t> direct;        // the destinations' copies
  std::vector<Repeated> repeated;
  std::vector<std::size_t> others;
};

struct ByteCopy {
  std::size_t number = 0;
  Destination destination;
};

struct Span {
  std::size_t number = 0;
  c10::Device device;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

// Whether bytes can be read or copied into a tensor's memory.
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.device().is_cpu() || SideStreams::are_supported(tensor.device());
}

inline std::optional<Span> span_of(const at::Tensor& tensor, std::size_t number) {
  if (tensor.numel() == 0 || !has_memory(tensor)) return std::nullopt;
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.mutable_data_ptr());
  return Span{number, tensor.device(), begin,
              begin + (static_cast<std::size_t>(last) + 1) * tensor.itemsize()};
}

inline bool is_bytes(const TensorCopy& copy) {
  const at::Tensor& target = copy.target;
  return copy.record && has_memory(target) && target.scalar_type() == copy.dtype &&
         target.is_conj() == copy.conj && target.is_neg() == copy.neg &&
         target.is_non_overlapping_and_dense() && target.strides() == at::IntArrayRef(copy.strides);
}

// The destination of a copy; its target has the copy's number.
inline Destination destination_of(const TensorCopy& copy, std::size_t number) {
  const auto itemsize = static_cast<std::uint64_t>(copy.target.itemsize());
  Destination destination{*copy.record, static_cast<std::uint64_t>(copy.offset) * itemsize,
                          static_cast<std::uint64_t>(copy.target.numel()) * itemsize,
                          static_cast<std::byte*>(copy.target.mutable_data_ptr())};
  if (!copy.target.device().is_cpu()) destination.target = number;
  return destination;
}

inline bool are_same(const Destination& a, const Destination& b) {
  return std::tie(a.record, a.offset, a.nbytes, a.place) ==
         std::tie(b.record, b.offset, b.nbytes, b.place);
}

// Finds the copies whose order matters: their targets overlap another copy's target, or a source
// that is not a record (a hook may pass on a tensor of the model).  The order of copies of the same
// bytes to the same place (tied parameters) does not matter.
inline std::vector<bool> find_ordered(const std::vector<TensorCopy>& copies,
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

inline bool have_same_layout(const TensorCopy& a, const TensorCopy& b) {
  return a.dtype == b.dtype && a.sizes == b.sizes && a.strides == b.strides && a.conj == b.conj &&
         a.neg == b.neg;
}

// Keeps one of several copies of the same bytes.  The others are repeated from its target, or
// dropped if they have the same target.  Records whose parts overlap in another way need a storage.
inline std::vector<CopySteps::Repeated> resolve_overlaps(const std::vector<TensorCopy>& copies,
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

// Plans copies from tensors whose bytes are still in an archive into existing tensors.  A copy is a
// read straight into place if dtype, strides and conjugation agree.  The same bytes for a second
// tensor are copied from the first.  Copies to overlapping targets keep their order, unless they
// copy the same bytes (tied parameters).  If is_whole[record], the record's storage has the bytes
// or gets them, and copies are made from there.  Does not need the GIL.
inline CopySteps plan_copies(const std::vector<TensorCopy>& copies,
                             const std::vector<bool>& is_whole) {
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

struct RestoreOptions {
  std::size_t n_threads;
  bool verify;
  std::size_t max_pinned_nbytes;  // host memory for bytes that go on to accelerators
};

// Copies that cannot be read into place take this much memory, or that of one record, at a time.
inline constexpr std::uint64_t kBatchNbytes = std::uint64_t{32} << 20;

// Whether a source may cross the bus unconverted, and be converted on the target's device.
inline bool crosses_as_it_is(const at::Tensor& source, const at::Tensor& target) {
  return source.defined() && source.is_cpu() && source.nbytes() > 0 &&
         SideStreams::are_supported(target.device()) &&
         convert_alike(source.scalar_type(), target.scalar_type()) && source.is_contiguous() &&
         !source.is_conj() && !source.is_neg();
}

// Sorts tensors' numbers by address, and keeps only the first of overlapping tensors.
inline void sort_apart(std::vector<std::size_t>& numbers, const std::vector<at::Tensor>& tensors) {
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

// Moves sources to the accelerator on which they are converted, unless they have few bytes.  They
// cross the bus together, in chunks of page-locked memory.
inline void move_sources(std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& targets,
                         const RestoreOptions& options, const Poll& poll) {
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

// Restores tensors.  Copies are collected first, so that all of them can be checked before the
// first one is made.  A copy that cannot be read into place goes through the record's own place in
// the reserved region.  These copies use 32 MiB or one record at a time, and return the memory
// afterwards.  A transfer records the payloads that it has begun to place, so the changed targets
// are known after an error.  Needs no GIL; not safe for concurrent use.
class Restore {
 public:
  // The reserved storage of a record.
  using StorageOf = std::function<c10::Storage(std::size_t record)>;

  // `reader`, and everything that `storage_of` refers to, must outlive this object.
  Restore(ArchiveReader& reader, StorageOf storage_of)
      : reader_(reader),
        storage_of_(std::move(storage_of)),
        is_filled_(reader.index().records().size()),
        has_changed_(reader.index().records().size()) {}

  // Plans target.copy_(source).  `record` is the source's record, if its storage is reserved.
  void add(at::Tensor target, const at::Tensor& source, std::optional<std::size_t> record) {
    copies_.emplace_back(std::move(target), source, record);
  }
  // Plans a copy of a record's bytes into a storage of the same size.
  void add(const c10::Storage& target, std::size_t record) {
    const at::Tensor bytes = bytes_of(target, 0, target.nbytes());
    copies_.emplace_back(bytes, bytes, record);
  }
  // Makes the copies that add() has planned, and fills the storages of `records`, which stay
  // filled.  Stops at damaged records and returns them.  Throws IoError, and at::Error from a copy.
  std::vector<DamagedRecord> run(std::span<const std::size_t> records,
                                 const RestoreOptions& options, const Poll& poll) {
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

  bool is_filled(std::size_t record) const { return is_filled_[record]; }
  // The records whose targets have changed or may have changed so far.
  std::vector<std::size_t> changed() const {
    std::vector<std::size_t> records;
    for (std::size_t i = 0; i < has_changed_.size(); ++i) {
      if (has_changed_[i]) records.push_back(i);
    }
    return records;
  }

 private:
  std::vector<DamagedRecord> fill(std::vector<Destination> destinations,
                                  const RestoreOptions& options, const Poll& poll) {
    if (destinations.empty()) return {};
    std::vector<at::Tensor> targets = accelerator_targets(destinations);
    if (targets.empty()) {
      return reader_.fill(destinations, options.n_threads, options.verify, poll);
    }
    AcceleratorUnstager unstager(std::move(targets), kMaxChunkNbytes, options.n_threads,
                                 options.max_pinned_nbytes);
    std::vector<DamagedRecord> damaged =
        reader_.fill(destinations, unstager.n_workers(), options.verify, poll, &unstager);
    unstager.drain();
    return damaged;
  }

  // The destinations' tensors on accelerators, which get new numbers.
  std::vector<at::Tensor> accelerator_targets(std::vector<Destination>& destinations) const {
    std::vector<at::Tensor> targets;
    for (Destination& destination : destinations) {
      if (!destination.target) continue;
      const at::Tensor& target = copies_[*destination.target].target;
      destination.target = targets.size();
      targets.push_back(bytes_of(target, 0, destination.nbytes));
    }
    return targets;
  }

  std::vector<DamagedRecord> read_direct(const CopySteps& steps, const std::vector<bool>& is_whole,
                                         const RestoreOptions& options, const Poll& poll) {
    std::vector<Destination> destinations = steps.destinations;
    for (std::size_t i = 0; i < is_whole.size(); ++i) {
      if (is_whole[i] && !is_filled_[i]) destinations.push_back(own_storage(i));
    }
    const auto note_changes = [&] {
      for (const std::size_t record : reader_.begun()) {
        // Reading a record into its own storage changes no target: has_changed_ keeps its earlier
        // value.
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

  std::vector<DamagedRecord> copy_others(const std::vector<std::size_t>& others,
                                         const RestoreOptions& options, const Poll& poll) {
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
  std::vector<at::Tensor> sources_of(std::span<const std::size_t> batch,
                                     const RestoreOptions& options, const Poll& poll) const {
    std::vector<at::Tensor> sources;
    std::vector<at::Tensor> targets;
    for (const std::size_t i : batch) {
      const TensorCopy& copy = copies_[i];
      sources.push_back(copy.record ? copy.source_in(storage_of_(*copy.record)) : at::Tensor());
      targets.push_back(copy.target);
    }
    // A target in host memory may be a later copy's source; copy() then moves each source by
    // itself.
    if (std::ranges::none_of(targets, [](const at::Tensor& target) { return target.is_cpu(); })) {
      move_sources(sources, targets, options, poll);
    }
    return sources;
  }

  void copy(const TensorCopy& copy, at::Tensor source, const RestoreOptions& options,
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

  Destination own_storage(std::size_t record) const {
    const std::uint64_t nbytes = reader_.index().records()[record].nbytes;
    return {record, 0, nbytes, static_cast<std::byte*>(storage_of_(record).mutable_data())};
  }

  ArchiveReader& reader_;
  StorageOf storage_of_;
  std::vector<TensorCopy> copies_;
  std::vector<bool> is_filled_;    // by record: whether its storage has its bytes
  std::vector<bool> has_changed_;  // by record: whether its targets may have changed
};

// The storages of a load.  Either start() reads in the background, or reserve() gives storages
// places and fill() reads.  Both start() and reserve() forget earlier storages.  Not safe for
// concurrent use.
class ArchiveStorages {
 public:
  // Waits for the payload of a record that is being read.
  using Wait = std::function<void(std::size_t record)>;

  // `reader` must outlive this object.
  ArchiveStorages(ArchiveReader& reader, Wait wait)
      : reader_(reader), wait_(std::move(wait)), records_(reader.index()) {}
  ArchiveStorages(const ArchiveStorages&) = delete;
  ArchiveStorages& operator=(const ArchiveStorages&) = delete;

  const DataRecords& records() const { return records_; }

  // Begins to read `records`.  Throws FormatError, IoError.
  void start(const std::vector<std::size_t>& records, std::size_t n_threads, bool verify,
             bool exact_offsets) {
    forget();
    reader_.start(records, n_threads, verify, exact_offsets);
    is_reading_ = true;
  }
  void reserve() {
    restore_.reset();
    forget();
    reader_.reserve(records_.storages());
    is_reading_ = false;
    restore_.emplace(reader_, [this](std::size_t record) { return storage(record); });
  }

  // From now on, loads storages saved at `location` to the CPU or, after reserve(), to an
  // accelerator.  The unpickler gets no storages of other locations.
  void place(const std::string& location, c10::Device device) {
    const auto place = std::ranges::find(places_, location, &Place::location);
    if (place == places_.end()) {
      places_.push_back({location, device});
    } else {
      place->device = device;
    }
  }
  // For the unpickler: see StorageSource::storage_of().
  const c10::Storage* storage_of(std::string_view key, std::uint64_t nbytes,
                                 std::string_view location) {
    const auto place = std::ranges::find(places_, location, &Place::location);
    if (place == places_.end()) return nullptr;
    const std::size_t i = records_.find(key);
    if (i == ArchiveIndex::kNotFound || reader_.index().records()[i].nbytes != nbytes) {
      return nullptr;
    }
    // An empty storage has no bytes to copy, and its location is never needed.
    if (nbytes == 0) return place->device.is_cpu() ? &storage(i) : nullptr;
    locations_.resize(n_records(), kNoPlace);
    if (locations_[i] == kNoPlace) {
      locations_[i] = static_cast<std::uint32_t>(place - places_.begin());
    }
    return place->device.is_cpu() ? &storage(i) : &storage_on(i, place->device);
  }

  // The storage of a record on the CPU, which may still be filling.  An empty one is new each time,
  // because torch makes one for each reference.
  const c10::Storage& storage(std::size_t record) {
    if (record < storages_.size() && storages_[record]) return storages_[record];
    LoadedPayload payload = reader_.payload(record);
    if (must_copy(payload) && is_reading_) wait_(record);
    const std::uint64_t nbytes = payload.nbytes;
    c10::Storage storage = make_storage(std::move(payload));
    if (nbytes == 0) return empty_storages_.emplace_back(std::move(storage));
    // A freed storage may have had the same address.
    if (restore_) record_by_storage_.insert_or_assign(storage.unsafeGetStorageImpl(), record);
    storages_.resize(n_records());
    return storages_[record] = std::move(storage);
  }

  // The storage on a device for the bytes of a record, which is not empty.
  // Not resizable before release(), so that a shape larger than the storage is an error.
  const c10::Storage& storage_on(std::size_t record, c10::Device device) {
    placed_.resize(n_records());
    if (!placed_[record]) {
      if (placed_records_.empty())
        SideStreams::refuse_capture(device);  // allocating would spoil it
      placed_[record] = empty_storage(reader_.index().records()[record].nbytes, device);
      placed_records_.push_back(record);
    }
    return placed_[record];
  }
  // The location of the storage that storage_of() has returned for a record, or null.
  const std::string* location_of(std::size_t record) const {
    const bool known = record < locations_.size() && locations_[record] != kNoPlace;
    return known ? &places_[locations_[record]].location : nullptr;
  }
  // The record whose reserved storage a tensor uses.
  std::optional<std::size_t> record_of(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return std::nullopt;
    const auto found = record_by_storage_.find(tensor.storage().unsafeGetStorageImpl());
    return found == record_by_storage_.end() ? std::nullopt : std::optional(found->second);
  }
  // The records whose storages have references outside this object.  Frees all other storages.
  // Releases each storage, and tries to get it back by a weak reference.  Counting references would
  // not help: a storage keeps its Python object, which keeps the storage.
  std::vector<std::size_t> referenced() {
    std::vector<std::size_t> records;
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      if (!storages_[i]) continue;
      const c10::weak_intrusive_ptr<c10::StorageImpl> weak = storages_[i].getWeakStorageImpl();
      record_by_storage_.erase(storages_[i].unsafeGetStorageImpl());
      storages_[i] = c10::Storage();
      if (auto found = weak.lock()) {
        record_by_storage_.emplace(found.get(), i);
        storages_[i] = c10::Storage(std::move(found));
        records.push_back(i);
      }
    }
    return records;
  }

  // Ends the load: its storages become resizable, like any other.
  void release() {
    for (std::vector<c10::Storage>* const storages : {&storages_, &empty_storages_, &placed_}) {
      for (c10::Storage& storage : *storages) {
        // Free the storage at once, while it is in the cache.
        if (const c10::Storage last = std::move(storage)) {
          last.unsafeGetStorageImpl()->set_resizable(true);
        }
      }
    }
    clear();
  }

  // See Restore; without reserve() these throw std::logic_error.
  void plan_copy(const at::Tensor& target, const at::Tensor& source) {
    restore().add(target, source, record_of(source));
  }
  std::vector<DamagedRecord> fill(std::span<const std::size_t> records,
                                  const RestoreOptions& options, const Poll& poll) {
    for (; n_planned_ < placed_records_.size(); ++n_planned_) {
      const std::size_t record = placed_records_[n_planned_];
      restore().add(placed_[record], record);
    }
    return restore().run(records, options, poll);
  }
  bool is_filled(std::size_t record) { return restore().is_filled(record); }
  std::vector<std::size_t> changed() { return restore().changed(); }

 private:
  struct Place {
    std::string location;
    c10::Device device;
  };
  static constexpr std::uint32_t kNoPlace = ~std::uint32_t{0};

  std::size_t n_records() const { return reader_.index().records().size(); }
  Restore& restore() {
    if (!restore_) throw std::logic_error("reserve() comes first");
    return *restore_;
  }
  void clear() {
    storages_.clear();
    empty_storages_.clear();
    placed_.clear();
    placed_records_.clear();
    n_planned_ = 0;
  }
  void forget() {
    clear();
    places_.clear();
    locations_.clear();
  }

  ArchiveReader& reader_;
  Wait wait_;
  DataRecords records_;
  std::vector<c10::Storage> storages_;  // by record; undefined if not needed yet
  std::vector<c10::Storage> empty_storages_;
  std::vector<Place> places_;
  std::vector<std::uint32_t> locations_;     // by record: into places_, or kNoPlace
  std::vector<c10::Storage> placed_;         // by record: on accelerators
  std::vector<std::size_t> placed_records_;  // in the order of placement
  std::size_t n_planned_ = 0;                // placed records with a planned copy
  bool is_reading_ = false;
  std::optional<Restore> restore_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> record_by_storage_;
};

}  // namespace ptsave
