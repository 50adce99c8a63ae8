// A part of a file as a tensor, without reading it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/file.h"

namespace ptsave {

// Bytes that come from the file when they are looked at; writing to them changes a copy in memory.
// IoError (errno 0 beyond the end).  The file may be closed.  If it becomes shorter while the
// tensor lives, the process is killed when it looks at what has gone.
at::Tensor map_range(const File& file, std::uint64_t offset, std::uint64_t nbytes);

}  // namespace ptsave
