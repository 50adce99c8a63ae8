// Runs the chunks of one transfer on worker threads.
//
// Workers take chunk numbers from one cursor, in order.  So every chunk before chunk n is done or
// in progress while a worker has chunk n, and waiting for an earlier chunk cannot deadlock.  The
// first exception stops the cursor, and is rethrown to the owner when all running chunks have
// ended.  Threads live as long as the object: none exists before or after a transfer.
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

// Called about ten times a second on the waiting thread; cancels the transfer by throwing.
using Poll = std::function<void()>;

// Reading fewer bytes than this takes less time than starting a thread.
inline constexpr std::uint64_t kThreadedNbytes = std::uint64_t{1} << 20;

// Whether workers give way to the program's other threads.
enum class Priority { kOfCaller, kBackground };

class ChunkPipeline {
 public:
  // Does one chunk; the pipeline is passed for wait_in_worker() and notify().
  using Work = std::function<void(ChunkPipeline& pipeline, std::size_t chunk)>;

  // Starts `n_threads` workers for chunks 0 .. n_chunks - 1; with n_threads == 0 the chunks run on
  // the waiting thread.  `work` is called concurrently, for different chunks.
  ChunkPipeline(std::size_t n_chunks, std::size_t n_threads, Work work,
                Priority priority = Priority::kOfCaller);
  // Cancels chunks that have not begun and joins the workers.
  ~ChunkPipeline();

  // Waits until every chunk is done.  Rethrows a worker's exception.  Owner only.
  void finish(const Poll& poll);
  // Waits until `ready` holds, or rethrows a worker's earlier exception.  `ready` is evaluated
  // under the pipeline's lock after each notify().  Owner only.
  void wait_until(const std::function<bool()>& ready, const Poll& poll);

  // For workers: starts up to `n_threads` more workers.
  void add_workers(std::size_t n_threads) noexcept;
  // For workers: waits until `ready` holds; throws Stopped if the transfer is cancelled meanwhile.
  void wait_in_worker(const std::function<bool()>& ready);
  // Makes waiting threads check `ready` again; call it after changing the state behind a `ready`.
  void notify();

  // Thrown inside workers when another worker failed; never reaches the owner.
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
  bool runs_here_ = false;            // started without workers: chunks run on the waiting thread
};

// Does all chunks of a transfer whose chunks do not wait for each other.
inline void run_chunks(std::size_t n_chunks, std::size_t n_threads,
                       const std::function<void(std::size_t chunk)>& work, const Poll& poll,
                       Priority priority = Priority::kOfCaller) {
  ChunkPipeline pipeline(
      n_chunks, n_threads, [&](ChunkPipeline& /*self*/, std::size_t chunk) { work(chunk); },
      priority);
  pipeline.finish(poll);
}

}  // namespace ptsave
