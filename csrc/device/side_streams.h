// Streams for copies beside the caller's streams, and tensors of bytes to copy.
//
// A transfer uses a few streams of each of its devices, from a stock that the process keeps.  A few
// suffice, because copies in one direction cross the bus one after the other. torch has 32 streams
// of each device, which other code uses, too.  A wait polls and sleeps, because waiting for CUDA's
// streams and events (as c10 makes them) keeps a core busy in each thread.
//
// A thread begins on device 0, and the events of c10 would make a context there, which takes
// hundreds of MiB of that GPU: CUDAGuardImpl::block(), record() and destroyEvent() switch to the
// event's device and back.  So all work here runs with its own device as the current one.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace ptsave {

// A uint8 tensor that views a part of a storage, because ATen copies tensors.
at::Tensor bytes_of(const c10::Storage& storage, std::uint64_t offset, std::uint64_t nbytes);

// The same over a part of a contiguous tensor.
at::Tensor bytes_of(const at::Tensor& tensor, std::uint64_t offset, std::uint64_t nbytes);

// The offset of a tensor's elements in its storage, in bytes.
std::uint64_t byte_offset(const at::Tensor& tensor);

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

// The streams of one transfer.  Their work comes after all work that the devices' current streams
// had when this object was made.  Safe for concurrent use.
class SideStreams {
 public:
  // A device, and the size of the scratch memory that each of its streams gets there.
  struct Part {
    c10::Device device;
    std::size_t scratch_nbytes = 0;
  };
  class Copies;

  // Parts of the same device are merged.  The current streams are the calling thread's.  Scratch
  // memory is allocated on them, so they can reuse it afterwards.  Throws as refuse_capture() does
  // for each device.
  explicit SideStreams(std::span<const Part> parts);
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;
  // All copies must have been waited for.
  ~SideStreams();

  // One of the devices, for a thread that works for this transfer to make current.
  c10::Device device() const { return sides_.front().device; }

  // Throws std::runtime_error if this thread's current stream captures a graph, because copies that
  // wait for it would be captured instead of made.  Before torch 2.13, which cannot be asked, the
  // driver's own error comes during the wait for the copies.
  static void refuse_capture(c10::Device device);

  // Waits until all unused streams have finished their work.
  static void wait_for_idle_streams();

  // Whether a device has streams and pinned host memory, which side copies need.
  static bool are_supported(c10::Device device);

 private:
  static constexpr std::size_t kStreams = 4;  // of each device

  struct Stream {
    std::mutex is_queued_to;  // keeps copies together that are queued together
    std::optional<c10::Stream> stream;
    at::Tensor scratch;  // undefined if the device had no room for it
  };
  // The streams of one device.
  struct Side {
    explicit Side(const Part& part);

    c10::Device device;
    std::size_t scratch_nbytes;
    std::optional<c10::Event> begin;  // after the caller's earlier work
    std::array<Stream, kStreams> streams;
    std::atomic<std::size_t> n_chosen{0};
  };
  // The events of one `Copies` object, by side, kept for reuse.
  struct Events {
    std::vector<std::optional<c10::Event>> events;
  };

  void start(Side& side);
  void end(std::size_t side) noexcept;
  std::size_t side_of(c10::Device device) const;
  const c10::Stream& ready(Side& side, Stream& stream);

  std::deque<Side> sides_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Events>> free_events_;
  std::size_t n_events_ = 0;
};

// The copies from or to one buffer, on one stream for each device.  Not safe for concurrent use.
class SideStreams::Copies {
 public:
  // `streams` must outlive it.
  explicit Copies(SideStreams& streams);
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  // Waits for all copies, even if some fail.
  ~Copies();

  // Calls `queue` with a stream of `device` as the current one.  Its argument is the stream's
  // scratch memory, or an undefined tensor; `queue` may use it for its own copies only.
  void queue(c10::Device device, const std::function<void(const at::Tensor& scratch)>& queue);
  // Waits for all copies, then throws the first error.
  void wait();

 private:
  // The stream that a side's copies use, and whether copies on it are still in progress.
  struct Place {
    Stream* stream = nullptr;
    bool under_way = false;
  };

  void wait_for(std::size_t side);

  SideStreams& streams_;
  std::unique_ptr<Events> events_;
  std::vector<Place> places_;  // by side
};

}  // namespace ptsave
