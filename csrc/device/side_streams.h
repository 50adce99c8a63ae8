// Streams for copies beside those of the caller.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace ptsave {

// Everything that is given to one of these streams comes after everything that the current streams
// of their devices had been given when this was made.  Safe for concurrent use.
class SideStreams {
 public:
  // Makes them wait for the current streams, of the calling thread, of `devices`.
  explicit SideStreams(std::span<const c10::Device> devices);
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  // A stream that nobody else is using, current on this thread as long as this lives.
  class Use {
   public:
    Use(SideStreams& streams, c10::Device device)
        : streams_(streams), stream_(streams.acquire(device)), guard_(stream_) {}
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { streams_.release(stream_); }

    // Happens when everything given to the stream so far is done.
    c10::Event record() const;
    // Waits for that, whatever became of it.
    void drain() const noexcept;

   private:
    SideStreams& streams_;
    c10::Stream stream_;
    c10::StreamGuard guard_;
  };

  // Whether a device has streams and pinned host memory, which copies beside the caller take.
  static bool are_supported(c10::Device device);

 private:
  c10::Stream acquire(c10::Device device);
  void release(c10::Stream stream);

  std::map<c10::DeviceIndex, c10::Event> callers_;
  std::mutex mutex_;
  std::size_t count_ = 0;
  std::vector<c10::Stream> free_;
};

// Waits for all of them, whatever becomes of each; then throws the error of the first that failed.
void synchronize(std::span<const c10::Event> events);

}  // namespace ptsave
