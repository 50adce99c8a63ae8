#include "device/side_streams.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

namespace ptsave {

at::Tensor bytes_of(const c10::Storage& storage, std::uint64_t offset, std::uint64_t nbytes) {
  const c10::DispatchKey key = c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device());
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), caffe2::TypeMeta::Make<std::uint8_t>());
  c10::TensorImpl* const impl = bytes.unsafeGetTensorImpl();
  impl->set_sizes_contiguous({static_cast<std::int64_t>(nbytes)});
  impl->set_storage_offset(static_cast<std::int64_t>(offset));
  return bytes;
}

at::Tensor bytes_of(const at::Tensor& tensor, std::uint64_t offset, std::uint64_t nbytes) {
  return bytes_of(tensor.storage(), byte_offset(tensor) + offset, nbytes);
}

std::uint64_t byte_offset(const at::Tensor& tensor) {
  return static_cast<std::uint64_t>(tensor.storage_offset()) * tensor.itemsize();
}

namespace {

// A copy of 4 MiB takes 80 to 300 us.
constexpr std::chrono::microseconds kMinPause{50};
constexpr std::chrono::microseconds kMaxPause{1000};

void wait_until_done(const c10::Event& event) {
  for (auto pause = kMinPause; !event.query(); pause = std::min(2 * pause, kMaxPause)) {
    std::this_thread::sleep_for(pause);
  }
}

// Only backends of torch 2.13 and later can be asked.
template <class Guard>
bool is_capturing(const Guard& impl, const c10::Stream& stream) {
  if constexpr (requires { impl.isStreamCapturing(stream); }) {
    return impl.isStreamCapturing(stream);
  }
  return false;
}

constexpr int kPoolSize = 32;  // CUDA's streams of each device

// Streams that no transfer is using.  Their number never shrinks.
class Stock {
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
Stock& stock() {
  static auto& instance = *new Stock;
  return instance;
}

// Returns an undefined tensor if the device has no room.
at::Tensor bytes_on(c10::Device device, std::size_t nbytes) {
  try {
    return at::empty({static_cast<std::int64_t>(nbytes)},
                     at::TensorOptions(at::kByte).device(device));
  } catch (const c10::OutOfMemoryError&) {
    return {};
  }
}

}  // namespace

SideStreams::Side::Side(const Part& part)
    : device(part.device), scratch_nbytes(part.scratch_nbytes) {}

SideStreams::SideStreams(std::span<const Part> parts) {
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

SideStreams::~SideStreams() {
  for (std::size_t side = 0; side < sides_.size(); ++side) end(side);
}

void SideStreams::start(Side& side) {
  const c10::DeviceGuard guard(side.device);
  const c10::impl::VirtualGuardImpl impl(side.device.type());
  const c10::Stream caller = impl.getStream(side.device);
  refuse_capture(side.device);
  if (side.scratch_nbytes > 0) {
    // Allocate before the event: earlier uses of this memory are then over when the event happens.
    for (Stream& stream : side.streams) stream.scratch = bytes_on(side.device, side.scratch_nbytes);
  }
  side.begin.emplace(side.device.type());
  side.begin->record(caller);
}

void SideStreams::end(std::size_t side) noexcept {
  Side& ending = sides_[side];
  for (Stream& stream : ending.streams) {
    if (stream.stream) stock().give_back(*stream.stream);
  }
  try {
    const c10::DeviceGuard guard(ending.device);
    ending.begin.reset();
    for (Stream& stream : ending.streams) stream.scratch.reset();
    for (const std::unique_ptr<Events>& events : free_events_) events->events[side].reset();
  } catch (const std::exception&) {
    return;  // the device and its events are lost
  }
}

void SideStreams::wait_for_idle_streams() {
  for (const c10::Stream& stream : stock().streams()) {
    const c10::DeviceGuard guard(stream.device());
    if (is_capturing(c10::impl::VirtualGuardImpl(stream.device_type()), stream)) continue;
    c10::Event event(stream.device_type());
    event.record(stream);
    wait_until_done(event);
  }
}

void SideStreams::refuse_capture(c10::Device device) {
  const c10::DeviceGuard guard(device);
  const c10::impl::VirtualGuardImpl impl(device.type());
  if (!is_capturing(impl, impl.getStream(device))) return;
  throw std::runtime_error("tensors on " + device.str() +
                           " cannot be saved or loaded while its current stream captures a graph: "
                           "do it before the capture begins or after it has ended");
}

std::size_t SideStreams::side_of(c10::Device device) const {
  const auto found = std::ranges::find(sides_, device, &Side::device);
  if (found == sides_.end()) throw std::logic_error("a copy to or from another device");
  return static_cast<std::size_t>(found - sides_.begin());
}

// The caller holds the stream's lock, and the device is the current one.
const c10::Stream& SideStreams::ready(Side& side, Stream& stream) {
  if (!stream.stream) {
    stream.stream = stock().take(side.device);
    side.begin->block(*stream.stream);
  }
  return *stream.stream;
}

bool SideStreams::are_supported(c10::Device device) {
  static std::atomic<c10::DeviceType> supported{c10::DeviceType::CPU};  // there is only one
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

SideStreams::Copies::Copies(SideStreams& streams)
    : streams_(streams), places_(streams.sides_.size()) {
  const std::lock_guard lock(streams_.mutex_);
  if (streams_.free_events_.empty()) {
    events_ = std::make_unique<Events>();
    events_->events.resize(streams_.sides_.size());
    streams_.free_events_.reserve(++streams_.n_events_);  // the destructor must not throw
  } else {
    events_ = std::move(streams_.free_events_.back());
    streams_.free_events_.pop_back();
  }
}

SideStreams::Copies::~Copies() {
  try {
    wait();
  } catch (const std::exception&) {
    for (Place& place : places_) place.under_way = false;  // failed copies have ended
  }
  const std::lock_guard lock(streams_.mutex_);
  streams_.free_events_.push_back(std::move(events_));
}

void SideStreams::Copies::queue(c10::Device device,
                                const std::function<void(const at::Tensor& scratch)>& queue) {
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
  std::optional<c10::Event>& event = events_->events[number];
  if (!event) event.emplace(device.type());
  std::exception_ptr error;
  try {
    queue(place.stream->scratch);
  } catch (...) {
    error = std::current_exception();  // copies queued before the error still run
  }
  event->record(stream);
  place.under_way = true;
  if (error) std::rethrow_exception(error);
}

void SideStreams::Copies::wait() {
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

void SideStreams::Copies::wait_for(std::size_t side) {
  const c10::DeviceGuard guard(streams_.sides_[side].device);
  wait_until_done(*events_->events[side]);
}

}  // namespace ptsave
