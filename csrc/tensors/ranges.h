// Parts of files and tensors: mapped without reading, or read into existing tensors, on the host or
// on accelerators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/io/file.h"
#include "core/io/ranges.h"
#include "core/read/reader.h"

namespace ptsave {

// A tensor of bytes that come from the file on access; writes change a copy in memory.  The file
// may be closed.  If it is truncated while the tensor lives, access to the missing bytes kills the
// process.  Throws IoError (errno 0 beyond the end).
at::Tensor map_range(const File& file, std::uint64_t offset, std::uint64_t nbytes);

// The same if the page cache is known to hold the whole range, so that access does not wait.  It
// does not make the pages present: a caller that copies from them does that in parallel, in fewer
// steps.
std::optional<at::Tensor> map_cached_range(const File& file, std::uint64_t offset,
                                           std::uint64_t nbytes);

// Replaces the memory of a mapped tensor's storage by a copy at the same address, which is
// independent of the file.  No thread may write to it meanwhile.  Throws IoError.
void detach_from_file(const c10::Storage& storage, const std::string& name);

// A block for resharding: the place of a CPU tensor's elements in a file, the first at `offset`,
// and strides in bytes.
struct TensorBox {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::vector<std::uint64_t> strides;
  at::Tensor target;
};

// Adds the runs of bytes that are contiguous in both file and target.  Throws std::invalid_argument
// unless there is one stride for each dimension.
void add_ranges(const TensorBox& box, std::vector<FileRange>& ranges);

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
