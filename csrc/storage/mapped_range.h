// Maps a part of a file as a tensor, without reading it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>

#include "core/io/file.h"

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

}  // namespace ptsave
