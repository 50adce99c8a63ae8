// The open files of a load that reads parts of them, many times.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/io/range_list.h"
#include "core/io/read_slots.h"
#include "core/io/source.h"
#include "core/memory/buffer.h"

namespace ptsave {

// Files, and the buffers through which their bytes come past the page cache: made once, because
// fresh memory costs more than the copy out of it.  Safe for concurrent use.
class RangeFiles {
 public:
  // Half as many reads as there are buffers go past the page cache at a time.  Other readers of the
  // files know of this one from now on.
  explicit RangeFiles(std::vector<ByteSource> sources, std::size_t n_buffers = 1);
  // Of somebody else's sources, which outlive this.
  explicit RangeFiles(std::span<const ByteSource> sources, std::size_t n_buffers = 1);

  std::span<const ByteSource> sources() const { return sources_; }
  BufferPool& buffers() { return buffers_; }
  ReadSlots& slots() { return slots_; }

 private:
  const std::vector<ByteSource> owned_;
  const std::span<const ByteSource> sources_;
  BufferPool buffers_;
  ReadSlots slots_;
};

}  // namespace ptsave
