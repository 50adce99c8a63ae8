// Reads parts of files into tensors that exist already, on the host or on accelerators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/io/range_files.h"
#include "core/io/range_read.h"

namespace ptsave {

// A part of a file, from `offset` on, that is all bytes of a contiguous tensor, which is in CPU
// memory or on a device that SideStreams supports.
struct TensorRange {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  at::Tensor target;
};

// One reading of many ranges.  One thread at a time, but for nbytes_read().
class RangeTargets {
 public:
  // Errors are those of RangeRead.
  RangeTargets(std::shared_ptr<RangeFiles> files, const std::vector<TensorRange>& ranges,
               std::uint64_t max_gap = RangeList::kMaxGapNbytes);

  // Returns when all bytes are in their tensors.  Those for accelerators go through at most
  // `max_pinned_nbytes` of page-locked memory, and come after the work that the current streams of
  // this thread have.  IoError, at::Error.
  void run(std::size_t n_threads, std::size_t max_pinned_nbytes, const Poll& poll);
  std::uint64_t nbytes_read() const { return read_.nbytes_read(); }

 private:
  std::vector<FileRange> file_ranges(const std::vector<TensorRange>& ranges);

  std::vector<at::Tensor> targets_;  // on accelerators
  RangeRead read_;
};

// Below this threads and streams cost more than they save.
inline constexpr std::uint64_t kMinPinnedNbytes = std::uint64_t{1} << 20;

// Whether the host and any device convert all values alike: not from numbers with fractions to
// integers, where those that do not fit become anything.
bool convert_alike(c10::ScalarType from, c10::ScalarType to);

// Copies the bytes of contiguous tensors in CPU memory to contiguous tensors of as many on
// accelerators, as RangeTargets::run() does: what is near each other crosses the bus together.
// std::invalid_argument if sources overlap.
struct ToAccelerator {
  at::Tensor source;
  at::Tensor target;
};
void copy_to_accelerators(const std::vector<ToAccelerator>& copies, std::size_t n_threads,
                          std::size_t max_pinned_nbytes, const Poll& poll);

}  // namespace ptsave
