// Reads parts of files into existing tensors, on the host or on accelerators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/io/ranges.h"

namespace ptsave {

// The part of a file from `offset` on with all bytes of a contiguous tensor, in CPU memory or on a
// device that SideStreams supports.
struct TensorRange {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  at::Tensor target;
};

// One read of many ranges.  Not safe for concurrent use, except nbytes_read().
class RangeTargets {
 public:
  // Throws as RangeRead does.
  RangeTargets(std::shared_ptr<RangeFiles> files, const std::vector<TensorRange>& ranges,
               std::uint64_t max_gap = RangeList::kMaxGapNbytes);

  // Returns when all bytes are in their tensors.  Bytes for accelerators go through at most
  // `max_pinned_nbytes` of page-locked memory, and arrive after the present work of this thread's
  // current streams.  Throws IoError, at::Error.
  void run(std::size_t n_threads, std::size_t max_pinned_nbytes, const Poll& poll);
  std::uint64_t nbytes_read() const { return read_.nbytes_read(); }

 private:
  std::vector<FileRange> file_ranges(const std::vector<TensorRange>& ranges);

  std::vector<at::Tensor> targets_;  // on accelerators
  RangeRead read_;
};

// For fewer bytes, threads and streams cost more than they save.
inline constexpr std::uint64_t kMinPinnedNbytes = std::uint64_t{1} << 20;

// Whether the host and every device convert all values alike.  They do not from fractional numbers
// to integers, because values that do not fit have no defined result.
bool convert_alike(c10::ScalarType from, c10::ScalarType to);

// A contiguous tensor in CPU memory, and a contiguous tensor of as many bytes on an accelerator.
//
// copy_to_accelerators() copies the bytes as RangeTargets::run() does: neighbours cross the bus
// together.  Throws std::invalid_argument if sources overlap.
struct ToAccelerator {
  at::Tensor source;
  at::Tensor target;
};
void copy_to_accelerators(const std::vector<ToAccelerator>& copies, std::size_t n_threads,
                          std::size_t max_pinned_nbytes, const Poll& poll);

}  // namespace ptsave
