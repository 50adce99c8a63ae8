#include "storage/range_targets.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "device/accelerator_unstager.h"
#include "device/bytes.h"

namespace ptsave {
namespace {

const std::byte* begin_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

}  // namespace

RangeTargets::RangeTargets(std::shared_ptr<RangeFiles> files,
                           const std::vector<TensorRange>& ranges, std::uint64_t max_gap)
    : read_(std::move(files), file_ranges(ranges), max_gap) {}

std::vector<FileRange> RangeTargets::file_ranges(const std::vector<TensorRange>& ranges) {
  std::vector<FileRange> result;
  result.reserve(ranges.size());
  for (const auto& [file, offset, target] : ranges) {
    const std::uint64_t nbytes = target.nbytes();
    if (target.is_cpu()) {
      result.push_back({file, offset, nbytes, static_cast<std::byte*>(target.mutable_data_ptr())});
    } else {
      result.push_back({file, offset, nbytes, nullptr, targets_.size()});
      targets_.push_back(bytes_of(target, 0, nbytes));
    }
  }
  return result;
}

void RangeTargets::run(std::size_t n_threads, std::size_t max_pinned_nbytes, const Poll& poll) {
  if (targets_.empty()) return read_.run(n_threads, poll);
  const std::size_t n_leases =
      AcceleratorUnstager::n_leases(n_threads, max_pinned_nbytes / RangeRead::kLeaseNbytes);
  AcceleratorUnstager unstager(targets_, RangeRead::kLeaseNbytes, n_leases);
  read_.run(std::min(n_threads, n_leases), poll, &unstager);
}

bool convert_alike(c10::ScalarType from, c10::ScalarType to) {
  return from == to || c10::isIntegralType(from, /*includeBool=*/true) ||
         !c10::isIntegralType(to, /*includeBool=*/true);
}

void copy_to_accelerators(const std::vector<ToAccelerator>& copies, std::size_t n_threads,
                          std::size_t max_pinned_nbytes, const Poll& poll) {
  if (copies.empty()) return;
  // Treat all memory between the sources as one file; the gaps are not read.
  const std::byte* begin = begin_of(copies.front().source);
  const std::byte* end = begin;
  for (const ToAccelerator& copy : copies) {
    begin = std::min(begin, begin_of(copy.source));
    end = std::max(end, begin_of(copy.source) + copy.source.nbytes());
  }
  std::vector<ByteSource> memory;
  memory.emplace_back(begin, static_cast<std::uint64_t>(end - begin), "memory");
  std::vector<TensorRange> ranges;
  ranges.reserve(copies.size());
  for (const ToAccelerator& copy : copies) {
    ranges.push_back({0, static_cast<std::uint64_t>(begin_of(copy.source) - begin), copy.target});
  }
  RangeTargets(std::make_shared<RangeFiles>(std::move(memory)), ranges)
      .run(n_threads, max_pinned_nbytes, poll);
}

}  // namespace ptsave
