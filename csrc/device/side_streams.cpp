#include "device/side_streams.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <exception>

namespace ptsave {

SideStreams::SideStreams(std::span<const c10::Device> devices) {
  for (const c10::Device device : devices) {
    if (callers_.contains(device.index())) continue;
    c10::Event event(device.type());
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    callers_.emplace(device.index(), std::move(event));
  }
}

c10::Event SideStreams::Use::record() const {
  c10::Event event(stream_.device_type());
  event.record(stream_);
  return event;
}

void SideStreams::Use::drain() const noexcept {
  try {
    stream_.synchronize();
  } catch (const std::exception&) {
    return;  // a stream that has failed copies nothing any more
  }
}

bool SideStreams::are_supported(c10::Device device) {
  static std::atomic<c10::DeviceType> supported{c10::DeviceType::CPU};  // there is but one
  if (supported.load(std::memory_order_relaxed) == device.type()) return !device.is_cpu();
  if (!at::accelerator::isAccelerator(device.type())) return false;
  try {
    c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    at::getHostAllocator(device.type());
  } catch (const c10::Error&) {
    return false;
  }
  supported.store(device.type(), std::memory_order_relaxed);
  return true;
}

c10::Stream SideStreams::acquire(c10::Device device) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(free_, device, &c10::Stream::device);
    if (found != free_.end()) {
      const c10::Stream stream = *found;
      free_.erase(found);
      return stream;
    }
  }
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::Stream stream = impl.getStreamFromGlobalPool(device);
  callers_.at(device.index()).block(stream);
  const std::lock_guard lock(mutex_);
  free_.reserve(++count_);  // release() must not throw
  return stream;
}

void SideStreams::release(c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  free_.push_back(stream);
}

void synchronize(std::span<const c10::Event> events) {
  std::exception_ptr error;
  for (const c10::Event& event : events) {
    try {
      event.synchronize();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace ptsave
