// Reads whole records of an archive into tensors that exist already, on the host or on
// accelerators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/read/reader.h"

namespace ptsave {

// Fills targets[k], contiguous and in CPU memory or on a device that SideStreams supports, with
// records[k]; no record comes twice.  Without targets records are only checked.  Bytes for
// accelerators go through at most `max_pinned_nbytes` of page-locked memory, and come after the
// work that the current streams of this thread have.  Damaged records are returned in file order.
// std::invalid_argument if sizes differ; IoError, FormatError, at::Error.
std::vector<DamagedRecord> read_records(const ArchiveReader& reader,
                                        const std::vector<std::size_t>& records,
                                        std::span<const at::Tensor> targets, std::size_t n_threads,
                                        bool verify, std::size_t max_pinned_nbytes,
                                        const Poll& poll);

// A part of an archive, from `offset` on, that is all bytes of a target as those above.
struct ArchiveRange {
  std::uint64_t offset = 0;
  at::Tensor target;
};

// Reads parts of an archive as they are; those for accelerators may not overlap.  IoError,
// at::Error.
void read_ranges(const ArchiveReader& reader, const std::vector<ArchiveRange>& ranges,
                 std::size_t n_threads, std::size_t max_pinned_nbytes, const Poll& poll);

}  // namespace ptsave
