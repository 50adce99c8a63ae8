// Streams for copies beside those of the caller, and waiting for them.
//
// A transfer has a few streams of each of its devices, out of a stock that the process keeps: the
// copies of one direction go over the bus one after the other anyway, and torch's own streams, 32
// of each device, are everybody's.  It waits by looking and sleeping, because waiting for CUDA's
// streams and events (as c10 makes them) keeps a core busy in each thread.
//
// A thread begins on device 0, and the events of c10 make a context there, which takes hundreds of
// MiB of that GPU: CUDAGuardImpl::block(), record() and destroyEvent() go to the event's device and
// set the one before again.  So whatever is done here is done with its device as the current one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace ptsave {

// The streams of one transfer.  Everything that is given to them comes after everything that the
// current streams of their devices had been given when this was made.  Safe for concurrent use.
class SideStreams {
 public:
  // A device, and the size of the memory there that each of its streams is to have for bytes in
  // between; 0 for none.
  struct Part {
    c10::Device device;
    std::size_t scratch_nbytes = 0;
  };
  class Copies;

  // Parts of one device become one.  The current streams are the calling thread's; scratch memory
  // is theirs, so they can use it again when this is gone.  As refuse_capture() for each device.
  explicit SideStreams(std::span<const Part> parts);
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;
  // All copies have been waited for.
  ~SideStreams();

  // Of one of the devices: to be the current one of a thread that works for this transfer.
  c10::Device device() const { return sides_.front().device; }

  // std::runtime_error if the current stream of this thread captures a graph: copies that wait for
  // it would be captured instead of made.  (Only torch 2.13 and later can be asked; before, the
  // driver's own error comes when the copies are waited for.)
  static void refuse_capture(c10::Device device);

  // Waits until the streams that no transfer is using have done all that they were ever given.
  static void wait_for_idle_streams();

  // Whether a device has streams and pinned host memory, which copies beside the caller take.
  static bool are_supported(c10::Device device);

 private:
  static constexpr std::size_t kStreams = 4;  // of each device

  struct Stream {
    std::mutex is_queued_to;  // what is queued together stays together
    std::optional<c10::Stream> stream;
    at::Tensor scratch;  // undefined if the device had no room for it
  };
  // The streams of one device.
  struct Side {
    explicit Side(const Part& part);

    c10::Device device;
    std::size_t scratch_nbytes;
    std::optional<c10::Event> begin;  // what the caller's stream had been given
    std::array<Stream, kStreams> streams;
    std::atomic<std::size_t> n_chosen{0};
  };
  // The events of one object `Copies`, kept for the next one.  By side.
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

// The copies from or to one buffer, on one stream of each device that they concern.  One thread at
// a time.
class SideStreams::Copies {
 public:
  // `streams` must outlive it.
  explicit Copies(SideStreams& streams);
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  // Waits for them, whatever becomes of each.
  ~Copies();

  // Gives copies to a stream of `device`, which is the current one for `queue`.  That gets the
  // stream's scratch memory, bytes of the device or an undefined tensor: what it puts there is
  // for its own copies only.
  void queue(c10::Device device, const std::function<void(const at::Tensor& scratch)>& queue);
  // Waits for all of them, whatever becomes of each; then throws the error of the first that
  // failed.
  void wait();

 private:
  // The stream of a side, if copies were given to it that nobody has waited for.
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
