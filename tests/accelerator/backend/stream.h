// The streams of the devices.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <set>
#include <string>
#include <vector>

#include "context.h"
#include "stream_queue.h"

namespace fake {

constexpr c10::DeviceIndex kDeviceCount = 2;
// As many as CUDA has: streams are handed out again only after that many.
constexpr c10::StreamId kPoolSize = 32;

using simulated::MarkerPtr;
using simulated::StreamQueue;

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

c10::Device device_of(c10::DeviceIndex index);
c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
// Throws for a device or stream that does not exist, and in a forked child, which has no threads.
StreamQueue& queue_of(const c10::Stream& stream);
// Queues work; what it throws is the device's pending error.
void enqueue(const c10::Stream& stream, simulated::Operation operation);
c10::Stream next_pool_stream(c10::DeviceIndex device);

// The calling thread's.
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(const c10::Stream& stream);

void release_streams();  // from delays of their own, from being held and from capturing
void drain(c10::DeviceIndex device);  // leaves the pending error alone

// Errors of operations are the device's, as with CUDA: whoever synchronizes next gets the first.
void set_pending_error(c10::DeviceIndex device, const std::string& message);
void throw_pending_error(c10::DeviceIndex device);
void clear_pending_error(c10::DeviceIndex device);

void watch_forks();  // to be called once
bool in_forked_child();

}  // namespace fake
