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

// Files, and the buffers for reads past the page cache.  The buffers are made once, because fresh
// memory costs more than the copy out of it.  Safe for concurrent use.
class RangeFiles {
 public:
  // Announces this reader.  At most half as many direct reads as buffers run at a time.
  explicit RangeFiles(std::vector<ByteSource> sources, std::size_t n_buffers = 1);
  // Borrows sources that outlive this object.
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
