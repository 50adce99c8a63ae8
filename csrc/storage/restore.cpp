#include "storage/restore.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "device/accelerator_unstager.h"
#include "device/bytes.h"
#include "device/side_streams.h"
#include "storage/range_targets.h"

namespace ptsave {
namespace {

// Bytes in memory at a time, or one record, of copies that are no reads into place.
constexpr std::uint64_t kBatchNbytes = std::uint64_t{32} << 20;
// Below this threads and streams cost more than they save.
constexpr std::uint64_t kMinPinnedNbytes = std::uint64_t{1} << 20;

// Between these the host and any device convert alike: not from numbers with fractions to integers,
// where those that do not fit become anything.
bool convert_alike(c10::ScalarType from, c10::ScalarType to) {
  return from == to || c10::isIntegralType(from, /*includeBool=*/true) ||
         !c10::isIntegralType(to, /*includeBool=*/true);
}

// The source's values on the target's device, if that is an accelerator and this takes no
// rearranging; else the source itself.
at::Tensor moved(const at::Tensor& source, const at::Tensor& target,
                 const Restore::Options& options, const Poll& poll) {
  const c10::Device device = target.device();
  const bool is_large = source.nbytes() >= kMinPinnedNbytes;
  if (!is_large || !convert_alike(source.scalar_type(), target.scalar_type()) ||
      !source.is_contiguous() || source.is_conj() || source.is_neg() ||
      !SideStreams::are_supported(device)) {
    return source;
  }
  at::Tensor there = at::empty(source.sizes(), source.options().device(device));
  std::vector<ByteSource> memory;
  memory.emplace_back(static_cast<const std::byte*>(source.const_data_ptr()), source.nbytes(),
                      "memory");
  RangeTargets targets(std::move(memory), {{0, 0, there}});
  targets.run(options.n_threads, options.max_pinned_nbytes, poll);
  return there;
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
      // A record whose targets an earlier run has changed stays changed when its storage is read.
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

// With the accelerators' memory that destinations mean, numbered anew; none without any.
std::unique_ptr<Unstager> Restore::unstager_for(std::vector<Destination>& destinations,
                                                std::size_t max_leases) const {
  std::vector<at::Tensor> targets;
  for (Destination& destination : destinations) {
    if (!destination.target) continue;
    const at::Tensor& target = copies_[*destination.target].target;
    const auto offset = static_cast<std::size_t>(target.storage_offset()) * target.itemsize();
    destination.target = targets.size();
    targets.push_back(bytes_of(target.storage(), offset, destination.nbytes));
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
      if (!record || is_filled_[*record]) continue;
      destinations.push_back(own_storage(*record));
      nbytes += destinations.back().nbytes;
      is_filled_[*record] = true;
    }
    std::vector<DamagedRecord> damaged = fill(destinations, options, poll);
    if (!damaged.empty()) return damaged;
    for (; begin != end; ++begin) {
      copy(copies_[*begin], options, poll);
      const std::optional<std::size_t> record = copies_[*begin].record;
      if (record && --n_uses[*record] == 0 && !stays[*record]) {
        reader_.discard(*record);
        is_filled_[*record] = false;
      }
    }
  }
  return {};
}

void Restore::copy(const TensorCopy& copy, const Options& options, const Poll& poll) {
  const at::NoGradGuard no_grad;
  if (!copy.record) {
    copy.target.copy_(copy.source);
    return;
  }
  const at::Tensor source = copy.source_in(storage_of_(*copy.record));
  // What is to be converted crosses the bus as it is, in chunks of page-locked memory.
  const at::Tensor there = moved(source, copy.target, options, poll);
  has_changed_[*copy.record] = true;
  copy.target.copy_(there);
}

std::vector<std::size_t> Restore::changed() const {
  std::vector<std::size_t> records;
  for (std::size_t i = 0; i < has_changed_.size(); ++i) {
    if (has_changed_[i]) records.push_back(i);
  }
  return records;
}

}  // namespace ptsave
