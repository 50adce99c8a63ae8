// Runs the chunks of one transfer on worker threads.
//
// Workers take chunk numbers from one cursor, in order, so whoever works on chunk n knows that
// every chunk before n is done or being worked on: waiting for an earlier chunk cannot deadlock.
// The first exception wins; it stops the cursor, and is rethrown to the owner once everything in
// flight has drained.  Threads live as long as the object: none exists before or after a transfer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ptsave {

// Called about ten times a second on the thread that waits; may throw, which cancels the transfer.
using Poll = std::function<void()>;

// Fewer bytes than this are read before a thread has started.
inline constexpr std::uint64_t kThreadedNbytes = std::uint64_t{1} << 20;

// Whether workers give way to other threads: those of a program that goes on meanwhile.
enum class Priority { kOfCaller, kBackground };

class ChunkPipeline {
 public:
  // Does one chunk; the pipeline is passed for wait_in_worker() and notify().
  using Work = std::function<void(ChunkPipeline& pipeline, std::size_t chunk)>;

  // Starts `n_threads` workers over chunks 0 .. n_chunks - 1; with n_threads == 0 the chunks run on
  // the thread that waits.  `work` is called concurrently, for different chunks.
  ChunkPipeline(std::size_t n_chunks, std::size_t n_threads, Work work,
                Priority priority = Priority::kOfCaller);
  ChunkPipeline(const ChunkPipeline&) = delete;
  ChunkPipeline& operator=(const ChunkPipeline&) = delete;
  // Cancels chunks that have not begun and joins the workers.
  ~ChunkPipeline();

  // Waits until every chunk is done.  Rethrows a worker's exception.  Owner only.
  void finish(const Poll& poll);
  // Waits until `ready` holds; it is evaluated under the pipeline's lock after each notify().
  // Rethrows a worker's exception if one comes first.  Owner only.
  void wait_until(const std::function<bool()>& ready, const Poll& poll);

  // For workers: starts so many more workers, as far as there are chunks and threads for them.
  void add_workers(std::size_t n_threads) noexcept;
  // For workers: waits until `ready` holds; throws Stopped if the transfer is cancelled meanwhile.
  void wait_in_worker(const std::function<bool()>& ready);
  // Makes waiting threads look again; call after changing the state that a `ready` depends on.
  void notify();

  // Thrown inside workers when another one failed; never reaches the owner.
  struct Stopped {};

 private:
  void start_workers(std::size_t n_threads) noexcept;
  void run_worker();
  bool run_next_chunk();
  void stop(std::exception_ptr error);
  void rethrow_error();

  const std::size_t n_chunks_;
  const Work work_;
  const Priority priority_;
  std::atomic<std::size_t> cursor_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t n_done_ = 0;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;  // grows under the lock, and not after `stopped_`
  bool runs_here_ = false;            // without workers at first: on the thread that waits
};

}  // namespace ptsave
