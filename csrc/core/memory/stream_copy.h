// Copies large memory past the cache, for targets that are not read soon.
#pragma once

#include <cstddef>

namespace ptsave {

// memcpy past the cache: the lines of the target are not read before they are overwritten, which is
// a third of the traffic.  The C library does so as well, but only above the size of a large cache.
void stream_copy(std::byte* target, const std::byte* source, std::size_t nbytes) noexcept;

}  // namespace ptsave
