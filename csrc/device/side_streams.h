// Streams for copies beside the caller's streams, and tensors of bytes to copy.
//
// A transfer uses a few streams of each of its devices, from a stock that the process keeps.  A few
// suffice, because copies in one direction cross the bus one after the other. torch has 32 streams
// of each device, which other code uses, too.  A wait polls and sleeps, because waiting for CUDA's
// streams and events (as c10 makes them) keeps a core busy in each thread.
//
// A new thread's current device is device 0.  The events of c10 would make a context there, which
// takes hundreds of MiB of that GPU: CUDAGuardImpl::destroyEvent() switches to the event's device
// and back, and before torch 2.14 block() and record() do so, too.  So all work here runs with its
// own device as the current one.
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace ptsave {

// A uint8 tensor that views a part of a storage, because ATen copies tensors.
inline at::Tensor bytes_of(const c10::Storage& storage, std::uint64_t offset,
                           std::uint64_t nbytes) {
  const c10::DispatchKey key = c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device());
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), caffe2::TypeMeta::Make<std::uint8_t>());
  c10::TensorImpl* const impl = bytes.unsafeGetTensorImpl();
  impl->set_sizes_contiguous({static_cast<std::int64_t>(nbytes)});
  impl->set_storage_offset(static_cast<std::int64_t>(offset));
  return bytes;
}

// The offset of a tensor's elements in its storage, in bytes.
inline std::uint64_t byte_offset(const at::Tensor& tensor) {
  return static_cast<std::uint64_t>(tensor.storage_offset()) * tensor.itemsize();
}

// A uint8 tensor that views a part of a contiguous tensor.
inline at::Tensor bytes_of(const at::Tensor& tensor, std::uint64_t offset, std::uint64_t nbytes) {
  return bytes_of(tensor.storage(), byte_offset(tensor) + offset, nbytes);
}

// Hides this thread's copies from autograd and Python modes, so that they need no GIL.
class RawCopies {
 public:
  RawCopies()
      : no_python_(
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})) {}

 private:
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_python_;
};

// A copy of 4 MiB takes 80 to 300 us.
inline constexpr std::chrono::microseconds kMinPause{50};
inline constexpr std::chrono::microseconds kMaxPause{1000};

inline void wait_until_done(const c10::Event& event) {
  for (auto pause = kMinPause; !event.query(); pause = std::min(2 * pause, kMaxPause)) {
    std::this_thread::sleep_for(pause);
  }
}

// For a stream whose event failed.  Its copies must end before their memory is used again.
inline void wait_without_event(const c10::Stream& stream) noexcept {
  try {
    stream.synchronize();
  } catch (const std::exception&) {
    return;  // the device has failed, and copies nothing
  }
}

// Always false before torch 2.13, because earlier backends cannot tell.
template <class Guard>
bool is_capturing(const Guard& impl, const c10::Stream& stream) {
  if constexpr (requires { impl.isStreamCapturing(stream); }) {
    return impl.isStreamCapturing(stream);
  }
  return false;
}

inline constexpr int kPoolSize = 32;  // CUDA's streams of each device

// Streams that no transfer is using.  Their number never shrinks.
class StreamStock {
 public:
  c10::Stream take(c10::Device device) {
    const c10::impl::VirtualGuardImpl impl(device.type());
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(streams_, [&](const c10::Stream& stream) {
      // torch's pool hands out each stream many times, so other code may capture a graph on it.
      return stream.device() == device && !is_capturing(impl, stream);
    });
    if (found != streams_.end()) {
      const c10::Stream stream = *found;
      streams_.erase(found);
      return stream;
    }
    streams_.reserve(++n_taken_);  // give_back() must not throw
    c10::Stream stream = impl.getStreamFromGlobalPool(device);
    for (int i = 0; i < kPoolSize && is_capturing(impl, stream); ++i) {
      stream = impl.getStreamFromGlobalPool(device);
    }
    return stream;
  }

  void give_back(c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  }

  std::vector<c10::Stream> streams() {
    const std::lock_guard lock(mutex_);
    return streams_;
  }

 private:
  std::mutex mutex_;
  std::vector<c10::Stream> streams_;
  std::size_t n_taken_ = 0;
};

// Never destroyed: a background save may outlive static objects.
inline StreamStock& stock() {
  static auto& instance = *new StreamStock;
  return instance;
}

// Returns an undefined tensor if the device has no room.
inline at::Tensor bytes_on(c10::Device device, std::size_t nbytes) {
  try {
    return at::empty({static_cast<std::int64_t>(nbytes)},
                     at::TensorOptions(at::kByte).device(device));
  } catch (const c10::OutOfMemoryError&) {
    return {};
  }
}

// The streams of one transfer.  They wait for all work that the devices' current streams had when
// this object was made.  Safe for concurrent use.
class SideStreams {
 public:
  // A device, and the size of the scratch memory that each of its streams gets there.
  struct Part {
    c10::Device device;
    std::size_t scratch_nbytes = 0;
  };
  class Copies;

  // Parts of the same device are merged.  The current streams are the calling thread's.  Scratch
  // memory is allocated on the current streams, so they can reuse it afterwards.  Throws as
  // refuse_capture() does for each device.
  explicit SideStreams(std::span<const Part> parts) {
    for (const Part& part : parts) {
      const auto known = std::ranges::find(sides_, part.device, &Side::device);
      if (known == sides_.end()) {
        sides_.emplace_back(part);
      } else {
        known->scratch_nbytes = std::max(known->scratch_nbytes, part.scratch_nbytes);
      }
    }
    try {
      for (Side& side : sides_) start(side);
    } catch (...) {
      for (std::size_t side = 0; side < sides_.size(); ++side) end(side);
      throw;
    }
  }

  // All copies must have been waited for.
  ~SideStreams() {
    for (std::size_t side = 0; side < sides_.size(); ++side) end(side);
  }

  // One of the devices.  A thread that works for this transfer makes it the current device.
  c10::Device device() const { return sides_.front().device; }

  // Throws std::runtime_error if this thread's current stream captures a graph, because copies that
  // wait for it would be captured instead of made.  Before torch 2.13 ptsave cannot detect this;
  // the driver's own error then comes during the wait.
  static void refuse_capture(c10::Device device) {
    const c10::impl::VirtualGuardImpl impl(device.type());
    if (!is_capturing(impl, impl.getStream(device))) return;
    throw std::runtime_error(
        "tensors on " + device.str() +
        " cannot be saved or loaded while the device's current stream captures a graph: "
        "save or load them before the capture begins or after it has ended");
  }

  // Waits until all unused streams have finished their work.  The current device must have a
  // context.
  static void wait_for_idle_streams() {
    for (const c10::Stream& stream : stock().streams()) {
      if (is_capturing(c10::impl::VirtualGuardImpl(stream.device_type()), stream)) continue;
      c10::Event event(stream.device_type());
      event.record(stream);
      wait_until_done(event);
    }
  }

  // Whether a device has streams and pinned host memory, which side copies need.
  static bool are_supported(c10::Device device) {
    static std::atomic<c10::DeviceType> supported{c10::DeviceType::CPU};  // a process has one type
    if (supported.load(std::memory_order_relaxed) == device.type()) return !device.is_cpu();
    if (!at::accelerator::isAccelerator(device.type())) return false;
    try {
      stock().give_back(stock().take(device));
      at::getHostAllocator(device.type());
    } catch (const c10::Error&) {
      return false;
    }
    supported.store(device.type(), std::memory_order_relaxed);
    return true;
  }

 private:
  static constexpr std::size_t kStreams = 4;  // of each device

  struct Stream {
    std::mutex is_queued_to;  // keeps the copies of one queue() call together
    std::optional<c10::Stream> stream;
    bool waits = false;  // for the caller's earlier work
    at::Tensor scratch;  // undefined if the device had no room for it
  };
  struct Side {
    explicit Side(const Part& part) : device(part.device), scratch_nbytes(part.scratch_nbytes) {}

    c10::Device device;
    std::size_t scratch_nbytes;
    std::optional<c10::Event> begin;  // after the caller's earlier work
    std::array<Stream, kStreams> streams;
    std::atomic<std::size_t> n_chosen{0};
  };
  // The events of one `Copies` object, by side, kept for reuse.
  using Events = std::vector<std::optional<c10::Event>>;

  void start(Side& side) {
    const c10::DeviceGuard guard(side.device);
    const c10::impl::VirtualGuardImpl impl(side.device.type());
    const c10::Stream caller = impl.getStream(side.device);
    refuse_capture(side.device);
    if (side.scratch_nbytes > 0) {
      // Allocate before the event: earlier uses of this memory are then over when the event
      // happens.
      for (Stream& stream : side.streams)
        stream.scratch = bytes_on(side.device, side.scratch_nbytes);
    }
    side.begin.emplace(side.device.type());
    side.begin->record(caller);
  }

  void end(std::size_t side) noexcept {
    Side& ending = sides_[side];
    for (Stream& stream : ending.streams) {
      if (stream.stream) stock().give_back(*stream.stream);
    }
    try {
      const c10::DeviceGuard guard(ending.device);
      ending.begin.reset();
      for (const std::unique_ptr<Events>& events : free_events_) (*events)[side].reset();
    } catch (const std::exception&) {
      return;  // the device and its events are lost
    }
  }

  std::size_t side_of(c10::Device device) const {
    const auto found = std::ranges::find(sides_, device, &Side::device);
    if (found == sides_.end()) throw std::logic_error("a copy to or from another device");
    return static_cast<std::size_t>(found - sides_.begin());
  }
  // The caller holds the stream's lock, and the device is the current one.
  const c10::Stream& ready(Side& side, Stream& stream) {
    if (!stream.stream) stream.stream = stock().take(side.device);
    if (is_capturing(c10::impl::VirtualGuardImpl(side.device.type()), *stream.stream)) {
      throw std::runtime_error(  // else the copies would become a part of the graph
          "a graph is being captured on a stream of " + side.device.str() +
          " that copies tensors: wait for wait_staged() before the capture begins");
    }
    if (!stream.waits) {
      side.begin->block(*stream.stream);
      stream.waits = true;  // not if block() failed: the next copies try again
    }
    return *stream.stream;
  }

  std::deque<Side> sides_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Events>> free_events_;
  std::size_t n_events_ = 0;
};

// The copies from or to one buffer, on one stream for each device.  Not safe for concurrent use.
class SideStreams::Copies {
 public:
  // `streams` must outlive this object.
  explicit Copies(SideStreams& streams) : streams_(streams), places_(streams.sides_.size()) {
    const std::lock_guard lock(streams_.mutex_);
    if (streams_.free_events_.empty()) {
      events_ = std::make_unique<Events>(streams_.sides_.size());
      streams_.free_events_.reserve(++streams_.n_events_);  // the destructor must not throw
    } else {
      events_ = std::move(streams_.free_events_.back());
      streams_.free_events_.pop_back();
    }
  }

  ~Copies() {
    try {
      wait();
    } catch (const std::exception&) {
      for (Place& place : places_) place.under_way = false;  // failed copies have ended
    }
    const std::lock_guard lock(streams_.mutex_);
    streams_.free_events_.push_back(std::move(events_));
  }

  // Calls `queue` with a stream of `device` as the current one.  Its argument is the stream's
  // scratch memory, or an undefined tensor; `queue` may use it for its own copies only.
  void queue(c10::Device device, const std::function<void(const at::Tensor& scratch)>& queue) {
    const std::size_t number = streams_.side_of(device);
    Side& side = streams_.sides_[number];
    Place& place = places_[number];
    if (place.stream == nullptr) {
      const std::size_t chosen = side.n_chosen.fetch_add(1, std::memory_order_relaxed);
      place.stream = &side.streams.at(chosen % kStreams);
    }
    const std::lock_guard lock(place.stream->is_queued_to);
    const c10::DeviceGuard device_guard(device);
    const c10::Stream& stream = streams_.ready(side, *place.stream);
    const c10::StreamGuard stream_guard(stream);
    std::optional<c10::Event>& event = (*events_)[number];
    if (!event) event.emplace(device.type());
    std::exception_ptr error;
    try {
      queue(place.stream->scratch);
    } catch (...) {
      error = std::current_exception();  // copies queued before the error still run
    }
    try {
      event->record(stream);
      place.under_way = true;
    } catch (...) {
      if (!error) error = std::current_exception();
      wait_without_event(stream);
    }
    if (error) std::rethrow_exception(error);
  }

  // Waits for all copies, then throws the first error.
  void wait() {
    std::exception_ptr error;
    for (std::size_t side = 0; side < places_.size(); ++side) {
      if (!std::exchange(places_[side].under_way, false)) continue;
      try {
        wait_for(side);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  // The stream that a side's copies use, and whether copies on it are still in progress.
  struct Place {
    Stream* stream = nullptr;
    bool under_way = false;
  };

  void wait_for(std::size_t side) {
    try {
      const c10::DeviceGuard guard(streams_.sides_[side].device);
      wait_until_done(*(*events_)[side]);
    } catch (...) {
      wait_without_event(*places_[side].stream->stream);  // a failed query does not end copies
      throw;
    }
  }

  SideStreams& streams_;
  std::unique_ptr<Events> events_;
  std::vector<Place> places_;  // by side
};

}  // namespace ptsave
