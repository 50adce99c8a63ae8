// The Python module _fake_accelerator: registers the backend, and gives tests a hold on it.
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "copy.h"
#include "memory.h"
#include "shape.h"
#include "stream.h"

namespace py = pybind11;

namespace fake {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context(device); }
  c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_current_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return maybe_exchange_current_device(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    const auto device = device_of_address(data);
    TORCH_CHECK(device.has_value(), "fake: ", data, " is not an address of a device");
    return *device;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t size) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), size);
  }
};

void register_backend() {
  watch_forks();
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator());
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &host_allocator());
  static auto& hooks = *new Hooks;  // as long as the process, as torch expects it
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

using StreamIds = std::pair<int, c10::StreamId>;  // device, stream

StreamQueue& queue_of_ids(const StreamIds& ids) {
  return queue_of(stream_of(static_cast<c10::DeviceIndex>(ids.first), ids.second));
}

void set_delay(std::int64_t min_us, std::int64_t max_us, std::optional<StreamIds> stream) {
  if (min_us < 0 || min_us > max_us) {
    throw py::value_error("a delay is from 0 or more to as much or more microseconds");
  }
  if (stream.has_value()) {
    queue_of_ids(*stream).set_delay({min_us, max_us});
  } else {
    simulated::default_min_us = min_us;
    simulated::default_max_us = max_us;
  }
}

py::dict stats() {
  const Counts counted = counts();
  const at::HostStats pinned = host_allocator().get_stats();
  py::dict result;
  for (const char* kind : {"h2d", "d2h", "d2d"}) {
    const auto found = counted.copies.find(kind);
    result[kind] = found == counted.copies.end() ? std::vector<std::size_t>{} : found->second;
  }
  for (const char* name : {"cat", "foreach_copy", "events", "streams", "busy_waits"}) {
    const auto found = counted.others.find(name);
    result[name] = found == counted.others.end() ? 0 : found->second;
  }
  result["pinned_bytes"] = pinned.active_bytes.current;
  result["pinned_peak"] = pinned.active_bytes.peak;
  result["pinned_reserved"] = pinned.allocated_bytes.current;
  return result;
}

void reset() {
  release_streams();
  set_delay(0, 300, std::nullopt);
  for (c10::DeviceIndex device = 0; device < kDeviceCount; ++device) {
    drain(device);
  }
  fail_no_copy();
  refuse_pinned(std::nullopt);
  reset_counts();
  host_allocator().reset_peak_stats();
  host_allocator().reset_accumulated_stats();
  for (c10::DeviceIndex device = 0; device < kDeviceCount; ++device) {
    clear_pending_error(device);
    device_allocator().resetPeakStats(device);
    device_allocator().resetAccumulatedStats(device);
  }
}

}  // namespace
}  // namespace fake

PYBIND11_MODULE(_fake_accelerator, module) {
  using namespace fake;
  using without_gil = py::call_guard<py::gil_scoped_release>;
  register_backend();
  module.def("initialize", [] { at::globalContext().lazyInitDevice(at::kPrivateUse1); });
  module.def("device_count", [] { return static_cast<int>(kDeviceCount); });
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device",
             [](int device) { set_current_device(static_cast<c10::DeviceIndex>(device)); });
  module.def("exchange_device", [](int device) {
    return static_cast<int>(exchange_current_device(static_cast<c10::DeviceIndex>(device)));
  });
  module.def("maybe_exchange_device", [](int device) {
    return static_cast<int>(maybe_exchange_current_device(static_cast<c10::DeviceIndex>(device)));
  });
  module.def("contexts", [] {
    std::map<int, std::set<int>> result;
    for (const auto& [device, threads] : contexts()) result[device] = threads;
    return result;
  });
  module.def("forget_contexts", &forget_contexts);
  module.def("is_in_bad_fork", &in_forked_child);
  module.def("set_delay", &set_delay, py::arg("min_us"), py::arg("max_us"),
             py::arg("stream") = py::none());
  module.def("set_held",
             [](const StreamIds& stream, bool held) { queue_of_ids(stream).set_held(held); });
  module.def("set_capturing", [](const StreamIds& stream, bool capturing) {
    queue_of_ids(stream).set_capturing(capturing);
  });
  module.def("n_captured",
             [](const StreamIds& stream) { return queue_of_ids(stream).n_captured(); });
  module.def("fail_copy", &fail_copy, py::arg("after"), py::arg("asynchronous"));
  module.def("refuse_pinned", &refuse_pinned, py::arg("after"));
  module.def("stats", &stats);
  module.def("operations_in_flight", [] { return simulated::operations_in_flight.load(); });
  module.def("reset", &reset, without_gil());
}
