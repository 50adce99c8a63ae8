#include "core/io/range_files.h"

#include <algorithm>
#include <utility>

namespace ptsave {

RangeFiles::RangeFiles(std::vector<ByteSource> sources, std::size_t n_buffers)
    : owned_(std::move(sources)),
      sources_(owned_),
      buffers_(std::max<std::size_t>(n_buffers, 1), RangeList::kWindowNbytes, Count::kUpTo),
      slots_(n_buffers) {
  for (const ByteSource& source : sources_) source.announce();
}

RangeFiles::RangeFiles(std::span<const ByteSource> sources, std::size_t n_buffers)
    : sources_(sources),
      buffers_(std::max<std::size_t>(n_buffers, 1), RangeList::kWindowNbytes, Count::kUpTo),
      slots_(n_buffers) {}

}  // namespace ptsave
