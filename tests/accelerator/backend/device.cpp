// The devices: their streams, their pending errors, and which streams are current in a thread.
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "copy.h"
#include "stream.h"

namespace fake {
namespace {

struct Device {
  std::mutex mutex;
  std::array<std::unique_ptr<StreamQueue>, 1 + kPoolSize> queues;  // made when first used
  c10::StreamId n_taken = 0;
  std::optional<std::string> pending_error;
};

// Leaked: threads of streams and storages freed at exit outlive every destructor.
Device& state_of(c10::DeviceIndex device) {
  static auto& devices = *new std::array<Device, kDeviceCount>;
  check_device(device);
  return devices.at(static_cast<std::size_t>(device));
}

std::atomic<bool> is_forked_child{false};

thread_local std::array<c10::StreamId, kDeviceCount> this_threads_streams{};

}  // namespace

void watch_forks() {
  const auto lock = [] { simulated::running_operations().lock(); };
  const auto unlock = [] { simulated::running_operations().unlock(); };
  const auto unlock_in_child = [] {
    is_forked_child = true;
    simulated::running_operations().unlock();
  };
  const int failed = pthread_atfork(lock, unlock, unlock_in_child);
  TORCH_CHECK(failed == 0, "fake: cannot watch forks: ", std::strerror(failed));
}

bool in_forked_child() { return is_forked_child.load(); }

c10::Device device_of(c10::DeviceIndex index) { return {c10::DeviceType::PrivateUse1, index}; }

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

StreamQueue& queue_of(const c10::Stream& stream) {
  // The fork may have happened while another thread held any of the locks.
  TORCH_CHECK(!in_forked_child(), "fake: cannot use the device in a forked child");
  TORCH_CHECK(stream.id() >= 0 && stream.id() <= kPoolSize, "fake: there is no ", stream);
  Device& device = state_of(stream.device_index());
  const std::lock_guard lock(device.mutex);
  auto& queue = device.queues.at(static_cast<std::size_t>(stream.id()));
  if (queue == nullptr) {
    queue = std::make_unique<StreamQueue>();
  }
  return *queue;
}

void enqueue(const c10::Stream& stream, simulated::Operation operation) {
  queue_of(stream).enqueue([operation = std::move(operation), device = stream.device_index()] {
    try {
      operation();
    } catch (const c10::Error& error) {
      set_pending_error(device, error.what_without_backtrace());
    } catch (const std::exception& error) {
      set_pending_error(device, error.what());
    }
  });
}

void Uses::free() {
  markers_.clear();
  for (const c10::Stream& stream : std::exchange(streams_, {})) {
    const OnDevice on_device(stream.device_index());
    markers_.push_back(queue_of(stream).mark());
  }
}

bool Uses::have_ended() const {
  return std::all_of(markers_.begin(), markers_.end(),
                     [](const MarkerPtr& marker) { return marker->is_complete(); });
}

c10::Stream next_pool_stream(c10::DeviceIndex device) {
  const OnDevice on_device(device);  // where they are created
  Device& state = state_of(device);
  count("streams");
  const std::lock_guard lock(state.mutex);
  return stream_of(device, 1 + state.n_taken++ % kPoolSize);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  check_device(device);
  return stream_of(device, this_threads_streams.at(static_cast<std::size_t>(device)));
}

void set_current_stream(const c10::Stream& stream) {
  check_device(stream.device_index());
  this_threads_streams.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
}

void drain(c10::DeviceIndex device) {
  TORCH_CHECK(!in_forked_child(), "fake: cannot use the device in a forked child");
  Device& state = state_of(device);
  std::vector<MarkerPtr> markers;
  {
    const std::lock_guard lock(state.mutex);
    for (const auto& queue : state.queues) {
      if (queue != nullptr) {
        markers.push_back(queue->mark());
      }
    }
  }
  for (const MarkerPtr& marker : markers) {
    marker->wait();
  }
}

void release_streams() {
  for (c10::DeviceIndex device = 0; device < kDeviceCount; ++device) {
    Device& state = state_of(device);
    const std::lock_guard lock(state.mutex);
    for (const auto& queue : state.queues) {
      if (queue != nullptr) {
        queue->release();
      }
    }
  }
}

void set_pending_error(c10::DeviceIndex device, const std::string& message) {
  Device& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  if (!state.pending_error.has_value()) {
    state.pending_error = message;
  }
}

void throw_pending_error(c10::DeviceIndex device) {
  Device& state = state_of(device);
  std::optional<std::string> message;
  {
    const std::lock_guard lock(state.mutex);
    message = std::exchange(state.pending_error, std::nullopt);
  }
  if (message.has_value()) {
    throw c10::AcceleratorError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, 1,
                                *message);
  }
}

void clear_pending_error(c10::DeviceIndex device) {
  Device& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  state.pending_error.reset();
}

}  // namespace fake
