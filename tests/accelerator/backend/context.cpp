#include "context.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <mutex>
#include <utility>

#include "stream.h"

namespace fake {
namespace {

constexpr c10::DeviceIndex kNone = -1;

thread_local c10::DeviceIndex actual_device = 0;      // the driver's
thread_local c10::DeviceIndex target_device = kNone;  // to be made the driver's when it is used

std::mutex mutex;
std::map<c10::DeviceIndex, std::set<int>> threads_by_device;
bool is_any_there = false;  // also of those that a test has forgotten

void touch(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex);
  is_any_there = true;
  threads_by_device[device].insert(gettid());
}

void set_actual_device(c10::DeviceIndex device) {
  actual_device = device;
  touch(device);
}

}  // namespace

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDeviceCount, "fake: there is no device ",
              static_cast<int>(device), ", only ", static_cast<int>(kDeviceCount));
}

c10::DeviceIndex current_device() { return target_device != kNone ? target_device : actual_device; }

void set_current_device(c10::DeviceIndex device) {
  check_device(device);
  target_device = kNone;
  if (device != actual_device) set_actual_device(device);
}

void maybe_set_current_device(c10::DeviceIndex device) {
  check_device(device);
  if (has_context(device)) {
    set_current_device(device);
  } else {
    target_device = device;
  }
}

c10::DeviceIndex exchange_current_device(c10::DeviceIndex device) {
  check_device(device);
  const bool was_pending = target_device != kNone;
  const c10::DeviceIndex previous = current_device();
  target_device = kNone;
  if (was_pending || device != previous) set_actual_device(device);
  return previous;
}

c10::DeviceIndex maybe_exchange_current_device(c10::DeviceIndex device) {
  const c10::DeviceIndex previous = current_device();
  if (device >= 0 && device != previous) maybe_set_current_device(device);
  return previous;
}

void use_current_device() {
  if (target_device != kNone) set_current_device(target_device);
  touch(actual_device);
}

void use_any_context() {
  {
    const std::lock_guard lock(mutex);
    if (is_any_there) return;
  }
  use_current_device();
}

bool has_context(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex);
  return threads_by_device.contains(device);
}

std::map<c10::DeviceIndex, std::set<int>> contexts() {
  const std::lock_guard lock(mutex);
  return threads_by_device;
}

void forget_contexts() {
  const std::lock_guard lock(mutex);
  threads_by_device.clear();
}

}  // namespace fake
