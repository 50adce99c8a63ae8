// Runs work on the threads of torch's operators.
//
// During training these threads are awake: they wait for the next operator in a busy loop for some
// milliseconds.  So they begin at once, while new threads would have to share their cores.
#pragma once

#include <cstddef>
#include <functional>

namespace ptsave {

// For fewer bytes, one thread is as fast.
inline constexpr std::size_t kMinSharedNbytes = std::size_t{512} << 10;

// Calls `work` for 0 .. n - 1 in up to `n_threads` runs of neighbours.  The runs are parallel
// unless torch has one thread (torch.set_num_threads) or this is one of torch's threads.  Rethrows
// an exception.
void share_out(std::size_t n, std::size_t n_threads, const std::function<void(std::size_t)>& work);

}  // namespace ptsave
