// Streams: threads that run what is queued on them in order, and late.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

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
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "context.h"

namespace fake {

constexpr c10::DeviceIndex kDeviceCount = 2;
constexpr c10::StreamId kDefaultStream = 0;
// As many as CUDA has: streams are handed out again only after that many.
constexpr c10::StreamId kPoolSize = 32;

using Operation = std::function<void()>;

// A point in a stream's queue, and whether the stream has passed it.
class Marker {
 public:
  using Clock = std::chrono::steady_clock;

  void complete() {
    const std::lock_guard lock(mutex_);
    completed_at_ = Clock::now();
    completed_.notify_all();
  }

  bool is_complete() const {
    const std::lock_guard lock(mutex_);
    return completed_at_.has_value();
  }

  void wait() const {
    std::unique_lock lock(mutex_);
    completed_.wait(lock, [this] { return completed_at_.has_value(); });
  }

  Clock::time_point completed_at() const {
    const std::lock_guard lock(mutex_);
    return completed_at_.value();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable completed_;
  std::optional<Clock::time_point> completed_at_;
};

using MarkerPtr = std::shared_ptr<Marker>;

struct StreamOrder {
  bool operator()(const c10::Stream& a, const c10::Stream& b) const { return a.hash() < b.hash(); }
};

// The streams other than its own that use a block, and then, once it was freed, how far they must
// get before it can be handed out again.
class Uses {
 public:
  void record(const c10::Stream& stream) { streams_.insert(stream); }
  bool are_none() const { return streams_.empty(); }
  void free();
  bool have_ended() const;

 private:
  std::set<c10::Stream, StreamOrder> streams_;
  std::vector<MarkerPtr> markers_;
};

// How long a stream waits before an operation: a random time between the two.
struct Delay {
  std::chrono::microseconds min;
  std::chrono::microseconds max;
};

class StreamQueue {
 public:
  StreamQueue(c10::DeviceIndex device, c10::StreamId id);

  // Work: it is delayed, and what it throws is the device's pending error.
  void enqueue(Operation operation);
  // Bookkeeping of events and allocators: it is neither delayed nor in flight.
  void enqueue_undelayed(Operation operation);

  MarkerPtr mark();
  void wait_for(MarkerPtr marker);  // the stream does, not the caller

  bool is_idle() const {
    const std::lock_guard lock(mutex_);
    return n_unfinished_ == 0;
  }

  // nullopt: that of all streams.
  void set_delay(std::optional<Delay> delay) {
    const std::lock_guard lock(mutex_);
    delay_ = delay;
  }

  // Nothing more is begun while it is held.
  void set_held(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    filled_.notify_one();
  }

  // While it captures a graph, nothing may be given to it.
  void set_capturing(bool capturing) {
    const std::lock_guard lock(mutex_);
    capturing_ = capturing;
    if (capturing) {
      n_captured_ = 0;
    }
  }

  bool is_capturing() const {
    const std::lock_guard lock(mutex_);
    return capturing_;
  }

  // What was given to it all the same.
  std::int64_t n_captured() const {
    const std::lock_guard lock(mutex_);
    return n_captured_;
  }

 private:
  enum class Kind {
    kWork,         // delayed
    kBookkeeping,  // the stream is not idle before it is done
    kMarker,       // whoever waits for it finds the stream idle
  };

  struct Entry {
    Operation operation;
    Kind kind = Kind::kWork;
  };

  void push(Entry entry);
  [[noreturn]] void run();
  void run_one(Entry& entry);
  std::chrono::microseconds next_delay();

  const c10::DeviceIndex device_;
  std::mt19937 random_;
  mutable std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Entry> entries_;
  std::optional<Delay> delay_;
  std::int64_t n_unfinished_ = 0;  // entries that are no markers
  bool held_ = false;
  bool capturing_ = false;
  std::int64_t n_captured_ = 0;
  bool has_thread_ = false;
};

c10::Device device_of(c10::DeviceIndex index);
c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
// Throws for a device or stream that does not exist, and in a forked child, which has no threads.
StreamQueue& queue_of(const c10::Stream& stream);
c10::Stream next_pool_stream(c10::DeviceIndex device);

// The calling thread's.
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(const c10::Stream& stream);

void set_default_delay(Delay delay);
void release_streams();  // from delays of their own, from being held and from capturing
std::int64_t operations_in_flight();
void drain(c10::DeviceIndex device);  // leaves the pending error alone

// Errors of operations are the device's, as with CUDA: whoever synchronizes next gets the first.
void set_pending_error(c10::DeviceIndex device, const std::string& message);
void throw_pending_error(c10::DeviceIndex device);
void clear_pending_error(c10::DeviceIndex device);

void watch_forks();  // to be called once
bool in_forked_child();
// Held by who runs an operation, and by who forks: a child would wait forever for what the thread
// of a stream had locked in torch.
std::shared_mutex& running_operations();

}  // namespace fake
