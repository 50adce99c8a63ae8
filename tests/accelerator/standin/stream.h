// The streams of the process.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../backend/stream_queue.h"
#include "state.h"

namespace standin {

using simulated::MarkerPtr;
using simulated::Operation;

class Stream : public simulated::StreamQueue {
 public:
  explicit Stream(int device) : device_(device) {}

  int device() const { return device_; }

  // The work is lost if a test wants the current call to fail late.  A device that has failed does
  // no more.
  void submit(Operation operation) {
    if (auto failure = std::exchange(lost_work, std::nullopt)) {
      operation = [failure = *failure, device = device_] { state().fail(device, failure); };
    }
    enqueue([operation = std::move(operation)] {
      if (state().sticky_error() == cudaSuccess) operation();
    });
  }

 private:
  const int device_;
};

// Streams are never destroyed.
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
    streams.reserve(streams_.size());
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
