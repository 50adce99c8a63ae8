#include "stream.h"

#include <c10/util/Exception.h>

#include <thread>
#include <utility>

namespace fake {
namespace {

std::atomic<std::int64_t> work_in_flight{0};
std::atomic<std::int64_t> default_min_us{0};
std::atomic<std::int64_t> default_max_us{300};

}  // namespace

StreamQueue::StreamQueue(c10::DeviceIndex device, c10::StreamId id)
    : device_(device), random_(static_cast<std::uint32_t>((kPoolSize + 1) * device + id)) {}

void StreamQueue::enqueue(Operation operation) {
  work_in_flight.fetch_add(1);
  push({std::move(operation), Kind::kWork});
}

void StreamQueue::enqueue_undelayed(Operation operation) {
  push({std::move(operation), Kind::kBookkeeping});
}

void StreamQueue::push(Entry entry) {
  const std::lock_guard lock(mutex_);
  // Allocators that poison what is freed are this backend's business.
  n_captured_ += capturing_ && entry.kind != Kind::kBookkeeping ? 1 : 0;
  n_unfinished_ += entry.kind == Kind::kMarker ? 0 : 1;
  entries_.push_back(std::move(entry));
  if (!has_thread_) {
    // Never joined: it waits on members of an object that is never destroyed.
    std::thread([this] { run(); }).detach();
    has_thread_ = true;
  }
  filled_.notify_one();
}

MarkerPtr StreamQueue::mark() {
  auto marker = std::make_shared<Marker>();
  push({[marker] { marker->complete(); }, Kind::kMarker});
  return marker;
}

void StreamQueue::wait_for(MarkerPtr marker) {
  enqueue_undelayed([marker = std::move(marker)] { marker->wait(); });
}

std::chrono::microseconds StreamQueue::next_delay() {
  std::int64_t min = default_min_us.load();
  std::int64_t max = default_max_us.load();
  const std::lock_guard lock(mutex_);
  if (delay_.has_value()) {
    min = delay_->min.count();
    max = delay_->max.count();
  }
  return std::chrono::microseconds(std::uniform_int_distribution<std::int64_t>(min, max)(random_));
}

void StreamQueue::run() {
  for (;;) {
    Entry entry;
    {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [this] { return !entries_.empty() && !held_; });
      entry = std::move(entries_.front());
      entries_.pop_front();
    }
    run_one(entry);
  }
}

void StreamQueue::run_one(Entry& entry) {
  if (entry.kind == Kind::kWork) {
    if (const auto delay = next_delay(); delay.count() > 0) {
      std::this_thread::sleep_for(delay);
    }
  }
  try {
    std::shared_lock lock(running_operations(), std::defer_lock);
    if (entry.kind == Kind::kWork) {  // the others may wait for work of other streams
      lock.lock();
    }
    entry.operation();
  } catch (const c10::Error& error) {
    set_pending_error(device_, error.what_without_backtrace());
  } catch (const std::exception& error) {
    set_pending_error(device_, error.what());
  }
  if (entry.kind == Kind::kWork) {
    work_in_flight.fetch_sub(1);
  }
  const std::lock_guard lock(mutex_);
  n_unfinished_ -= entry.kind == Kind::kMarker ? 0 : 1;
}

void set_default_delay(Delay delay) {
  default_min_us = delay.min.count();
  default_max_us = delay.max.count();
}

std::int64_t operations_in_flight() { return work_in_flight.load(); }

}  // namespace fake
