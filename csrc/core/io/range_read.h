// Reads parts of files into memory that exists already: the tensors of a format that is a header
// and bytes, such as safetensors, of all of a model's files at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/io/range_files.h"
#include "core/io/range_list.h"
#include "core/pipeline/pipeline.h"

namespace ptsave {

// One reading of many ranges.  Their memory must outlive it.  One thread at a time, but for
// nbytes_read().
class RangeRead {
 public:
  static constexpr std::size_t kLeaseNbytes = RangeList::kWindowNbytes;

  // std::invalid_argument for a range of no file and for ranges that overlap in a file; IoError for
  // one beyond the end of its file.  (Places must not overlap either; nobody checks that.)
  RangeRead(std::shared_ptr<RangeFiles> files, std::vector<FileRange> ranges,
            std::uint64_t max_gap = RangeList::kMaxGapNbytes);

  // Returns when all bytes are in their places.  IoError.  `unstager`, which may be null, is for
  // ranges with targets; each thread holds a lease of at most kLeaseNbytes of it.  Copies that it
  // has been sent may still be under way if this throws.
  void run(std::size_t n_threads, const Poll& poll, Unstager* unstager = nullptr);
  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

 private:
  void read(std::size_t stretch, Unstager* unstager) const;

  const std::shared_ptr<RangeFiles> files_;
  const RangeList ranges_;
  std::atomic<std::uint64_t> nbytes_read_{0};
};

}  // namespace ptsave
