// Pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace fake {

// As CUDA's: blocks are powers of two and cached.  A freed block that was recorded on streams is
// not handed out again before those have passed the point of the free; one that was not recorded is
// handed out at once, and poisoned by whoever gets it.
at::HostAllocator& host_allocator();

bool is_pinned(const void* address);  // also inside a block

}  // namespace fake
