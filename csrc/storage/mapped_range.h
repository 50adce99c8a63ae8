// A part of a file as a tensor, without reading it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>

#include "core/io/file.h"

namespace ptsave {

// Bytes that come from the file when they are looked at; writing to them changes a copy in memory.
// IoError (errno 0 beyond the end).  The file may be closed.  If it becomes shorter while the
// tensor lives, the process is killed when it looks at the missing bytes.
at::Tensor map_range(const File& file, std::uint64_t offset, std::uint64_t nbytes);

// The same if the page cache is known to hold all of it, so that looking at it does not wait.
// (The pages are not made present here: who copies from them does that in parallel, in fewer
// steps.)
std::optional<at::Tensor> map_cached_range(const File& file, std::uint64_t offset,
                                           std::uint64_t nbytes);

// Makes the storage of a mapped tensor independent of the file: a copy takes its place, at the same
// address.  Nobody may be writing to it.  IoError.
void detach_from_file(const c10::Storage& storage, const std::string& name);

}  // namespace ptsave
