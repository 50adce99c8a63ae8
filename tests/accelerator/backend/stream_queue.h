// Streams of simulated devices, also of the stand-in for CUDA: threads that run what is queued on
// them, in order and late.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
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

namespace simulated {

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

// A stream's thread holds it shared during an operation.  Forks and the exit hold it alone, because
// an operation may hold locks of torch.
inline std::shared_mutex& running_operations() {
  static auto& instance = *new std::shared_mutex;
  return instance;
}

class StreamQueue {
 public:
  // Queues a copy or a kernel, which throws nothing.
  void enqueue(Operation operation) {
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

  void set_delay(Delay delay) {
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
  // Ends holding, capturing, and the delay of its own.
  void release() {
    const std::lock_guard lock(mutex_);
    delay_.reset();
    is_capturing_ = is_held_ = false;
    changed_.notify_all();
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
        entry.operation();
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

}  // namespace simulated
