// Streams: threads that run what is queued on them, in order and late.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

#include "state.h"

namespace standin {

using Operation = std::function<void()>;

// A point in a stream's queue, and whether the stream has passed it.
class Marker {
 public:
  void complete() {
    is_complete_ = true;
    is_complete_.notify_all();
  }
  bool is_complete() const { return is_complete_; }
  void wait() const { is_complete_.wait(false); }

 private:
  std::atomic<bool> is_complete_ = false;
};
using MarkerPtr = std::shared_ptr<Marker>;

// A stream waits a random time between the two before each operation, in microseconds.
struct Delay {
  std::int64_t min;
  std::int64_t max;
};
// Of streams without a delay of their own.
inline std::atomic<std::int64_t> default_min_us = 0;
inline std::atomic<std::int64_t> default_max_us = 300;
inline std::atomic<std::int64_t> operations_in_flight = 0;

class Stream {
 public:
  explicit Stream(int device) : device_(device) {}

  int device() const { return device_; }

  // Queues a copy or a kernel.  It is lost if a test wants the current call to fail late.
  void enqueue(Operation operation) {
    if (auto failure = std::exchange(lost_work, std::nullopt)) {
      operation = [failure = *std::move(failure), device = device_] {
        state().fail(device, failure);
      };
    }
    ++operations_in_flight;
    push({std::move(operation), nullptr, Kind::kWork});
  }
  // Queues what the hardware would not do: no delay, and allowed in a capture.
  void enqueue_poison(Operation operation) {
    push({std::move(operation), nullptr, Kind::kPoisoning});
  }
  void wait_for(MarkerPtr marker) { push({{}, std::move(marker), Kind::kWait}); }
  // An idle stream passes a marker at once, because torch soon asks whether it has.
  MarkerPtr mark() {
    auto marker = std::make_shared<Marker>();
    if (is_idle() && !is_capturing()) {
      marker->complete();
    } else {
      push({{}, marker, Kind::kMarker});
    }
    return marker;
  }

  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return n_unfinished_ == 0;
  }
  bool is_capturing() {
    const std::lock_guard lock(mutex_);
    return is_capturing_;
  }
  // Operations that the stream got while it captured a graph.
  std::int64_t n_captured() {
    const std::lock_guard lock(mutex_);
    return n_captured_;
  }

  // Without a delay of its own, a stream has the default one.
  void set_delay(std::optional<Delay> delay) {
    const std::lock_guard lock(mutex_);
    delay_ = delay;
  }
  // A stream that is held begins nothing.
  void set_held(bool held) {
    const std::lock_guard lock(mutex_);
    is_held_ = held;
    changed_.notify_all();
  }
  void set_capturing(bool capturing) {
    const std::lock_guard lock(mutex_);
    is_capturing_ = capturing;
    if (capturing) n_captured_ = 0;
  }

 private:
  enum class Kind { kWork, kPoisoning, kWait, kMarker };
  struct Entry {
    Operation operation;
    MarkerPtr marker;
    Kind kind = Kind::kWork;
  };

  void push(Entry entry) {
    const std::lock_guard lock(mutex_);
    if (is_capturing_ && entry.kind != Kind::kPoisoning) {  // it becomes a part of the graph
      ++n_captured_;
      if (entry.kind == Kind::kWork) --operations_in_flight;
      if (entry.kind == Kind::kMarker) entry.marker->complete();
      return;
    }
    if (entry.kind != Kind::kMarker) ++n_unfinished_;  // after a wait the stream is idle
    entries_.push_back(std::move(entry));
    if (!has_thread_) std::thread([this] { run(); }).detach();  // streams are never destroyed
    has_thread_ = true;
    changed_.notify_all();
  }

  [[noreturn]] void run() {
    std::minstd_rand random(std::random_device{}());
    for (;;) {
      Entry entry;
      Delay delay{default_min_us, default_max_us};
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !entries_.empty() && !is_held_; });
        entry = std::move(entries_.front());
        entries_.pop_front();
        delay = delay_.value_or(delay);
      }
      if (entry.kind == Kind::kWork && delay.max > 0) {
        const auto us = std::uniform_int_distribution(delay.min, delay.max)(random);
        std::this_thread::sleep_for(std::chrono::microseconds(us));
      }
      if (entry.kind == Kind::kWait) entry.marker->wait();
      if (entry.operation) {
        const std::shared_lock lock(running_operations());
        // A device that has failed does no more.
        if (state().sticky_error() == cudaSuccess) entry.operation();
        entry.operation = nullptr;
      }
      if (entry.kind == Kind::kWork) --operations_in_flight;
      if (entry.kind == Kind::kMarker) {
        entry.marker->complete();
      } else {
        const std::lock_guard lock(mutex_);
        --n_unfinished_;
      }
    }
  }

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  std::optional<Delay> delay_;
  std::int64_t n_unfinished_ = 0;  // entries that are no markers
  std::int64_t n_captured_ = 0;
  bool is_held_ = false;
  bool is_capturing_ = false;
  bool has_thread_ = false;
};

// The streams of the process, which are never destroyed.
class Streams {
 public:
  Streams() {
    for (int device = 0; device < kDevices; ++device) add(device);
  }

  Stream& add(int device) {
    const std::lock_guard lock(mutex_);
    return *streams_.emplace_back(std::make_unique<Stream>(device));
  }
  // The stream of a handle.  The handles of default streams do not say which device they are of.
  Stream& find(cudaStream_t handle, int device) {
    if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
      const std::lock_guard lock(mutex_);
      return *streams_.at(static_cast<std::size_t>(device));
    }
    return *reinterpret_cast<Stream*>(handle);
  }
  std::vector<Stream*> all() {
    const std::lock_guard lock(mutex_);
    std::vector<Stream*> streams;
    for (const auto& stream : streams_) streams.push_back(stream.get());
    return streams;
  }
  // Waits for all work of a device; returns whether there was any.
  bool drain(int device) {
    std::vector<MarkerPtr> markers;
    bool was_busy = false;
    for (Stream* stream : all()) {
      if (stream->device() != device || stream->is_capturing()) continue;
      was_busy = was_busy || !stream->is_idle();
      markers.push_back(stream->mark());
    }
    for (const MarkerPtr& marker : markers) marker->wait();
    return was_busy;
  }

 private:
  std::mutex mutex_;
  std::deque<std::unique_ptr<Stream>> streams_;  // the default streams of the devices come first
};

inline Streams& streams() {
  static auto& instance = *new Streams;
  return instance;
}
inline Stream& stream_of(cudaStream_t handle, int device = current_device) {
  return streams().find(handle, device);
}

}  // namespace standin
