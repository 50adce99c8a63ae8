// Reads parts of files into existing memory: the tensors of all of a model's files, in a format
// such as safetensors that is a header and bytes.
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

// One read of many ranges, whose memory must outlive it.  Not safe for concurrent use, except
// nbytes_read().
class RangeRead {
 public:
  static constexpr std::size_t kLeaseNbytes = RangeList::kWindowNbytes;

  // Throws std::invalid_argument for a bad file number or for ranges that overlap in a file, and
  // IoError for a range beyond the end of its file.  Places must not overlap (unchecked).
  RangeRead(std::shared_ptr<RangeFiles> files, std::vector<FileRange> ranges,
            std::uint64_t max_gap = RangeList::kMaxGapNbytes);

  // Returns when all bytes are in their places.  Ranges with targets need an `unstager`; each
  // thread holds a lease of at most kLeaseNbytes.  Throws IoError; copies may then still be in
  // flight.
  void run(std::size_t n_threads, const Poll& poll, Unstager* unstager = nullptr);
  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

 private:
  void read(std::size_t stretch, Unstager* unstager) const;

  const std::shared_ptr<RangeFiles> files_;
  const RangeList ranges_;
  std::atomic<std::uint64_t> nbytes_read_{0};
};

}  // namespace ptsave
