#include "storage/record_targets.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "device/accelerator_unstager.h"
#include "device/bytes.h"
#include "storage/range_targets.h"

namespace ptsave {
namespace {

std::span<std::byte> memory_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// Returns the tensors on accelerators as bytes, and sets their numbers in the destinations.
std::vector<at::Tensor> accelerator_targets(std::vector<Destination>& destinations,
                                            std::span<const at::Tensor> tensors) {
  std::vector<at::Tensor> targets;
  auto destination = destinations.begin();  // empty tensors have none
  for (const at::Tensor& tensor : tensors) {
    if (tensor.nbytes() == 0) continue;
    if (!tensor.is_cpu()) {
      destination->target = targets.size();
      targets.push_back(bytes_of(tensor, 0, tensor.nbytes()));
    }
    ++destination;
  }
  return targets;
}

}  // namespace

std::vector<DamagedRecord> read_records(const ArchiveReader& reader,
                                        const std::vector<std::size_t>& records,
                                        std::span<const at::Tensor> targets, std::size_t n_threads,
                                        bool verify, std::size_t max_pinned_nbytes,
                                        const Poll& poll) {
  std::vector<std::span<std::byte>> memory;
  memory.reserve(targets.size());
  for (const at::Tensor& target : targets) memory.push_back(memory_of(target));
  std::vector<Destination> destinations = whole_payloads(reader.index(), records, memory);
  std::vector<at::Tensor> on_accelerators = accelerator_targets(destinations, targets);
  if (on_accelerators.empty()) {
    return reader.read_records(records, destinations, n_threads, verify, poll);
  }
  const std::size_t n_leases =
      AcceleratorUnstager::n_leases(n_threads, max_pinned_nbytes / kMaxChunkNbytes);
  AcceleratorUnstager unstager(std::move(on_accelerators), kMaxChunkNbytes, n_leases);
  // Each worker holds a lease while it reads.
  std::vector<DamagedRecord> damaged = reader.read_records(
      records, destinations, std::min(n_threads, n_leases), verify, poll, &unstager);
  unstager.drain();
  return damaged;
}

void read_ranges(const ArchiveReader& reader, const std::vector<ArchiveRange>& ranges,
                 std::size_t n_threads, std::size_t max_pinned_nbytes, const Poll& poll) {
  std::vector<TensorRange> on_accelerators;
  for (const auto& [offset, target] : ranges) {
    if (target.is_cpu()) {
      const std::span<std::byte> memory = memory_of(target);
      reader.read_range(offset, memory.data(), memory.size(), n_threads, poll);
    } else {
      on_accelerators.push_back({0, offset, target});
    }
  }
  if (on_accelerators.empty()) return;
  auto files = std::make_shared<RangeFiles>(std::span(&reader.source(), 1), n_threads);
  RangeTargets(std::move(files), on_accelerators).run(n_threads, max_pinned_nbytes, poll);
}

}  // namespace ptsave
