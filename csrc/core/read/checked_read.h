// Reads parts of files into memory that exists already, in whole blocks whose checksums a table
// knows: what is copied out of them has been checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/io/range_files.h"
#include "core/io/range_list.h"
#include "core/pipeline/pipeline.h"

namespace ptsave {

// A block whose checksum differs.
struct DamagedBlock {
  std::size_t file = 0;
  std::uint64_t offset = 0;

  auto operator<=>(const DamagedBlock&) const = default;
};

// One reading of many ranges, none with a target; those of a file may overlap, and then the bytes
// that they share are read more than once.  One thread at a time, but for nbytes_read().
class CheckedRead {
 public:
  // The checksums of a file's blocks, or none: nothing of it is checked.
  using Table = std::span<const std::uint32_t>;

  // Of more bytes than `max_gap` that nobody wants none is read, but for the rest of a block.
  // Places and tables outlive the reading.  std::invalid_argument for a range of no file; IoError
  // for one beyond the end of its file or of its table.
  CheckedRead(std::shared_ptr<RangeFiles> files, std::vector<FileRange> ranges,
              std::vector<Table> tables, std::uint64_t max_gap);

  // Returns when all bytes are in their places, but for those read together with damaged blocks,
  // which are returned in the order of files and offsets.  IoError.
  std::vector<DamagedBlock> run(std::size_t n_threads, const Poll& poll);
  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

 private:
  // Whole blocks that are read together: [begin, end) of a file.
  struct Stretch {
    std::size_t file = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t first_range = 0;
    std::size_t end_range = 0;
  };

  void check() const;
  void cut(std::uint64_t max_gap);
  void read(const Stretch& stretch);
  Stretch read_cached(Stretch rest, std::byte* buffer);
  void fetch(const Stretch& stretch, std::byte* buffer) const;
  void deliver(const Stretch& stretch, const std::byte* buffer);
  bool is_whole(const Stretch& stretch, const std::byte* buffer);
  void copy_out(const Stretch& stretch, const std::byte* buffer) const;

  const std::shared_ptr<RangeFiles> files_;
  std::vector<FileRange> ranges_;
  const std::vector<Table> tables_;
  std::vector<Stretch> stretches_;
  std::mutex mutex_;
  std::vector<DamagedBlock> damaged_;
  std::atomic<std::uint64_t> nbytes_read_{0};
};

}  // namespace ptsave
