// Reads whole records of an archive into existing tensors, on the host or on accelerators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/read/reader.h"

namespace ptsave {

// Reads records[k] into targets[k], which is contiguous and in CPU memory or on a device that
// SideStreams supports.  No record may occur twice.  Without targets, only checks the records.
// Returns damaged records in file order.  Bytes for accelerators go through at most
// `max_pinned_nbytes` of page-locked memory, and arrive after the present work of this thread's
// current streams.  Throws std::invalid_argument if sizes differ; IoError, FormatError, at::Error.
std::vector<DamagedRecord> read_records(const ArchiveReader& reader,
                                        const std::vector<std::size_t>& records,
                                        std::span<const at::Tensor> targets, std::size_t n_threads,
                                        bool verify, std::size_t max_pinned_nbytes,
                                        const Poll& poll);

// The part of an archive from `offset` on with all bytes of a target (see read_records()).
struct ArchiveRange {
  std::uint64_t offset = 0;
  at::Tensor target;
};

// Reads parts of an archive unchecked.  Parts for accelerators must not overlap.  IoError,
// at::Error.
void read_ranges(const ArchiveReader& reader, const std::vector<ArchiveRange>& ranges,
                 std::size_t n_threads, std::size_t max_pinned_nbytes, const Poll& poll);

}  // namespace ptsave
