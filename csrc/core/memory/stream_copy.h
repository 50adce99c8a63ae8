// Copies large memory past the cache, for targets that are not read soon.
#pragma once

#include <cstddef>

namespace ptsave {

// memcpy past the cache: it does not read the target's lines before it overwrites them, which saves
// a third of the traffic.  The C library does this only above the size of a large cache.
void stream_copy(std::byte* target, const std::byte* source, std::size_t nbytes) noexcept;

}  // namespace ptsave
