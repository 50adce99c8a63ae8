// The processor time of the calling thread: waiting for a core does not count.
#pragma once

#include <chrono>
#include <ctime>

namespace ptsave {

inline std::chrono::nanoseconds thread_cpu_time() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace ptsave
