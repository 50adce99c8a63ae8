// Memory of the devices, and pinned memory of the host.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <optional>

namespace fake {

// The address where an operation on a stream may touch what is at a device's address.
std::byte* accessible(const void* device_address);
std::optional<c10::Device> device_of_address(const void* address);

// Ordered by streams, as CUDA's: a block belongs to the stream that was current when it was
// allocated.  Freed, it is poisoned by an operation on that stream and handed out again to the
// next allocation on that stream, at once, unless it was recorded on other streams: then when those
// have passed the point of the free.
c10::DeviceAllocator& device_allocator();

// As CUDA's: blocks are powers of two and cached.  A freed block that was recorded on streams is
// not handed out again before those have passed the point of the free; one that was not recorded is
// handed out at once, and poisoned by whoever gets it.
at::HostAllocator& host_allocator();

bool is_pinned(const void* address);  // also inside a block
// Refuses pinned memory after so many more blocks, except cached blocks; without a number, never.
void refuse_pinned(std::optional<std::size_t> after);

}  // namespace fake
