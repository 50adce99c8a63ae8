// Reads parts of files into existing memory, in whole blocks that are checked against a table of
// checksums before bytes are copied out.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/io/ranges.h"
#include "core/pipeline/pipeline.h"

namespace ptsave {

// A block whose checksum differs.
struct DamagedBlock {
  std::size_t file = 0;
  std::uint64_t offset = 0;

  auto operator<=>(const DamagedBlock&) const = default;
};

// One read of many ranges without targets.  Ranges of a file may overlap; shared bytes may then be
// read more than once.  Not safe for concurrent use, except nbytes_read().
class CheckedRead {
 public:
  // The checksums of a file's blocks; empty for a file that is not checked.
  using Table = std::span<const std::uint32_t>;

  // Ranges at most `max_gap` apart are read together; larger gaps are skipped, up to whole blocks.
  // Places and tables must outlive this object.  Throws std::invalid_argument for a bad file
  // number, and IoError for a range beyond the end of its file or table.
  CheckedRead(std::shared_ptr<RangeFiles> files, std::vector<FileRange> ranges,
              std::vector<Table> tables, std::uint64_t max_gap);

  // Returns the damaged blocks in the order of files and offsets, when all bytes are in their
  // places, except bytes that were read together with a damaged block.  Throws IoError.
  std::vector<DamagedBlock> run(std::size_t n_threads, const Poll& poll);
  std::uint64_t nbytes_read() const { return nbytes_read_.load(std::memory_order_relaxed); }

 private:
  using Stretch = RangeList::Stretch;  // of whole blocks

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
