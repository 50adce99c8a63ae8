#include "core/pipeline/pipeline.h"

#include <cxxabi.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <new>
#include <system_error>
#include <utility>

namespace ptsave {
namespace {
constexpr std::chrono::milliseconds kPollInterval{100};
// Beside busy threads, workers with this priority get a sixtieth of the processors: none starves.
constexpr int kBackgroundNice = 19;

// Lowers the priority of the calling thread, unless it is low already.  A failure does not matter.
void give_way() {
  const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
  if (::getpriority(PRIO_PROCESS, thread) < kBackgroundNice) {
    static_cast<void>(::setpriority(PRIO_PROCESS, thread, kBackgroundNice));
  }
}

// Whether address space for allocations remains beside a new thread's stack (see RLIMIT_AS).
bool has_room_for_thread() {
  constexpr std::size_t kNbytes = std::size_t{24} << 20;  // a stack has 8 MiB by default
  void* memory = ::mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory != MAP_FAILED && ::munmap(memory, kNbytes) == 0;
}
}  // namespace

ChunkPipeline::ChunkPipeline(std::size_t n_chunks, std::size_t n_threads, Work work,
                             Priority priority)
    : n_chunks_(n_chunks), work_(std::move(work)), priority_(priority) {
  const std::lock_guard lock(mutex_);
  start_workers(n_threads);
  runs_here_ = workers_.empty();
}

void ChunkPipeline::add_workers(std::size_t n_threads) noexcept {
  const std::lock_guard lock(mutex_);
  // After a stop, the owner joins the workers without the lock.
  if (!stopped_.load(std::memory_order_relaxed)) start_workers(n_threads);
}

void ChunkPipeline::start_workers(std::size_t n_threads) noexcept {
  for (std::size_t i = 0; i < n_threads && workers_.size() < n_chunks_; ++i) {
    if (!has_room_for_thread()) break;
    try {
      workers_.emplace_back([this] { run_worker(); });
    } catch (const std::system_error&) {
      break;  // out of threads: the existing ones (or finish() itself) do the work
    } catch (const std::bad_alloc&) {
      break;  // or of memory; not rethrown: destroying a running thread ends the process
    }
  }
}

ChunkPipeline::~ChunkPipeline() {
  stop(nullptr);
  for (std::thread& worker : workers_) worker.join();
}

void ChunkPipeline::run_worker() {
  if (priority_ == Priority::kBackground) give_way();
  while (run_next_chunk()) {
  }
}

bool ChunkPipeline::run_next_chunk() {
  if (stopped_.load(std::memory_order_relaxed)) return false;
  const std::size_t chunk = cursor_.fetch_add(1, std::memory_order_relaxed);
  if (chunk >= n_chunks_) return false;
  try {
    work_(*this, chunk);
  } catch (const Stopped&) {
    return false;
  } catch (const abi::__forced_unwind&) {
    throw;  // the thread is being ended (pthread_exit); swallowing this is fatal
  } catch (...) {
    stop(std::current_exception());
    return false;
  }
  const std::lock_guard lock(mutex_);
  ++n_done_;
  changed_.notify_all();
  return true;
}

void ChunkPipeline::stop(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  stopped_.store(true, std::memory_order_relaxed);
  if (error && !error_) error_ = std::move(error);
  changed_.notify_all();
}

void ChunkPipeline::rethrow_error() {
  stop(nullptr);
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  std::rethrow_exception(error_);
}

void ChunkPipeline::finish(const Poll& poll) {
  wait_until([this] { return n_done_ == n_chunks_; }, poll);
}

void ChunkPipeline::wait_until(const std::function<bool()>& ready, const Poll& poll) {
  // Without workers all chunks run here, even chunks that only a later wait needs.
  while (runs_here_ && run_next_chunk()) poll();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kPollInterval, [&] { return error_ || ready(); });
      if (!error_ && ready()) return;
      if (error_) {
        lock.unlock();
        rethrow_error();
      }
    }
    poll();
  }
}

void ChunkPipeline::wait_in_worker(const std::function<bool()>& ready) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stopped_.load(std::memory_order_relaxed) || ready(); });
  if (!ready()) throw Stopped{};
}

void ChunkPipeline::notify() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

}  // namespace ptsave
