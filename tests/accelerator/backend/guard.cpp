// Device guard: the interface through which device-generic code drives devices, streams and events.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "copy.h"
#include "memory.h"
#include "stream.h"

namespace fake {
namespace {

// What a c10::Event points to.  Recording again makes a new marker: who waits for the old one
// waits for the old point.
class Event {
 public:
  void record(const c10::Stream& stream) {
    MarkerPtr marker = queue_of(stream).mark();
    const std::lock_guard lock(mutex_);
    marker_ = std::move(marker);
    device_ = stream.device_index();
  }

  MarkerPtr marker() const {
    const std::lock_guard lock(mutex_);
    return marker_;
  }

  c10::DeviceIndex device() const {
    const std::lock_guard lock(mutex_);
    return device_;
  }

 private:
  mutable std::mutex mutex_;
  MarkerPtr marker_;
  c10::DeviceIndex device_ = 0;
};

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    check_type(device);
    return device_of(exchange_current_device(device.index()));
  }
  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device device) const override {
    check_type(device);
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDeviceCount) {
      maybe_set_current_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return next_pool_stream(index_of(device));
  }
  // As CUDA: nobody owns a stream, so they are shared.
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return next_pool_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = current_stream(stream.device_index());
    set_current_stream(stream);
    return previous;
  }
  bool queryStream(const c10::Stream& stream) const override {
    const OnDevice on_device(stream.device_index());
    if (!queue_of(stream).is_idle()) {
      return false;
    }
    throw_pending_error(stream.device_index());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const OnDevice on_device(stream.device_index());
    wait_busily(*queue_of(stream).mark());
    throw_pending_error(stream.device_index());
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    const OnDevice on_device(stream.device_index());
    return queue_of(stream).is_capturing();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const c10::DeviceIndex index = device < 0 ? current_device() : device;
    const AtDevice at_device(index);
    drain(index);
    throw_pending_error(index);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "fake: an event of device ",
                static_cast<int>(device), " cannot be recorded on ", stream);
    const AtDevice at_device(stream.device_index());
    if (*event == nullptr) {
      *event = new Event;
      count("events");
    }
    static_cast<Event*>(*event)->record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      const AtDevice at_device(stream.device_index());
      queue_of(stream).wait_for(static_cast<Event*>(event)->marker());
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    const auto& recorded = *static_cast<Event*>(event);
    if (!recorded.marker()->is_complete()) {
      return false;
    }
    throw_pending_error(recorded.device());
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    const auto& recorded = *static_cast<Event*>(event);
    wait_busily(*recorded.marker());
    throw_pending_error(recorded.device());
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (event == nullptr) {
      return;
    }
    const AtDevice at_device(device);
    delete static_cast<Event*>(event);
  }

 private:
  static void check_type(c10::Device device) {
    TORCH_CHECK(device.is_privateuseone(), "fake: not a device of this backend: ", device);
  }
  // As CUDA waits by default.
  static void wait_busily(const simulated::Marker& marker) {
    if (!marker.is_complete()) {
      count("busy_waits");
    }
    marker.wait();
  }
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

}  // namespace
}  // namespace fake
