// Counts, contexts and errors of the process's calls.
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <shared_mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../backend/stream_queue.h"

namespace standin {

inline constexpr int kDevices = 2;

// A failure that a test has planned.
struct Failure {
  // `kOnce` fails one call, `kAlways` every such call from then on.  `kSticky` fails every call of
  // any name from then on, as an illegal address does.
  enum class Extent { kOnce, kAlways, kSticky };

  std::string call;        // such as "cudaMemcpyAsync"
  std::int64_t after = 0;  // that many such calls succeed first
  cudaError_t error = cudaSuccess;
  Extent extent = Extent::kOnce;
  bool is_late = false;  // the call succeeds, but its work is lost and fails
};

inline thread_local int current_device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;
// False while this thread's calls stand for a kernel.
inline thread_local bool is_counting = true;
inline thread_local std::optional<Failure> lost_work;  // fails in place of the work queued next

using simulated::running_operations;

class State {
 public:
  // Counts a call.  Returns the error that it ends with before it does anything.
  cudaError_t begin(const char* call) {
    if (has_ended_) return cudaErrorCudartUnloading;
    if (is_forked_child()) return cudaErrorInitializationError;
    const std::lock_guard lock(mutex_);
    if (is_counting) ++counts_["calls." + std::string(call)];
    if (sticky_ != cudaSuccess || !is_counting || !failure_) return sticky_;
    if (failure_->call != call) return cudaSuccess;
    if (failure_->after > 0) {
      --failure_->after;
      return cudaSuccess;
    }
    const Failure failure = *failure_;
    if (failure.extent != Failure::Extent::kAlways) failure_.reset();
    if (failure.is_late) {
      lost_work = failure;
      return cudaSuccess;
    }
    if (failure.extent == Failure::Extent::kSticky) sticky_ = failure.error;
    return failure.error;
  }

  bool is_forked_child() const { return owner_ != 0 && owner_ != ::getpid(); }

  // Notes that this thread uses a device's context, which comes into being by that.
  void use_context(int device) {
    const std::lock_guard lock(mutex_);
    owner_ = ::getpid();
    threads_by_device_[device].insert(::gettid());
  }
  bool has_context(int device) {
    const std::lock_guard lock(mutex_);
    return threads_by_device_.contains(device);
  }
  void forget_contexts() {
    const std::lock_guard lock(mutex_);
    threads_by_device_.clear();
  }

  void count(const std::string& name) {
    if (!is_counting) return;
    const std::lock_guard lock(mutex_);
    ++counts_[name];
  }
  void count_copy(const std::string& kind, std::size_t nbytes) {
    if (!is_counting) return;
    const std::lock_guard lock(mutex_);
    copies_[kind].push_back(nbytes);
  }
  // A kernel that is not emulated; a reset does not forget it.
  void count_missing(const std::string& kernel) {
    const std::lock_guard lock(mutex_);
    missing_.insert(kernel);
  }

  void plan(Failure failure) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
  }
  // Work of a device has failed.
  void fail(int device, const Failure& failure) {
    const std::lock_guard lock(mutex_);
    cudaError_t& error = failure.extent == Failure::Extent::kSticky
                             ? sticky_
                             : pending_.at(static_cast<std::size_t>(device));
    if (error == cudaSuccess) error = failure.error;
  }
  // The error of work that has failed, for the call that waits for this device next.
  cudaError_t take_error(int device) {
    const std::lock_guard lock(mutex_);
    if (sticky_ != cudaSuccess) return sticky_;
    return std::exchange(pending_.at(static_cast<std::size_t>(device)), cudaSuccess);
  }
  cudaError_t sticky_error() {
    const std::lock_guard lock(mutex_);
    return sticky_;
  }

  // Lines of a name and a number each; a list has several lines.
  std::string report() {
    const std::lock_guard lock(mutex_);
    std::ostringstream text;
    for (const auto& [name, count] : counts_) text << name << ' ' << count << '\n';
    for (const std::string& kernel : missing_) text << "missing." << kernel << " 1\n";
    for (const auto& [kind, sizes] : copies_) {
      for (const std::size_t nbytes : sizes) text << kind << ' ' << nbytes << '\n';
    }
    for (const auto& [device, threads] : threads_by_device_) {
      for (const int thread : threads) text << "context." << device << ' ' << thread << '\n';
    }
    return text.str();
  }
  // Forgets counts, failures and errors.
  void reset() {
    const std::lock_guard lock(mutex_);
    counts_.clear();
    copies_.clear();
    failure_.reset();
    pending_.fill(cudaSuccess);
    sticky_ = cudaSuccess;
  }

  // As the runtime does when the process exits: later calls fail, and no operation begins.
  void end() {
    has_ended_ = true;
    running_operations().lock();
  }
  void lock_for_fork() {
    running_operations().lock();
    mutex_.lock();
  }
  void unlock_after_fork() {
    mutex_.unlock();
    running_operations().unlock();
  }
  // Threads that waited for the lock are counted in it, and the child does not have them.
  void renew_in_child() {
    mutex_.unlock();
    new (&running_operations()) std::shared_mutex;
  }

 private:
  std::atomic<bool> has_ended_ = false;
  std::atomic<pid_t> owner_ = 0;  // the process that made the first context
  std::mutex mutex_;
  std::map<std::string, std::int64_t> counts_;
  std::map<std::string, std::vector<std::size_t>> copies_;
  std::map<int, std::set<int>> threads_by_device_;
  std::set<std::string> missing_;
  std::optional<Failure> failure_;
  std::array<cudaError_t, kDevices> pending_{};  // by device
  cudaError_t sticky_ = cudaSuccess;
};

inline State& state() {
  static auto& instance = *new State;
  return instance;
}

}  // namespace standin
