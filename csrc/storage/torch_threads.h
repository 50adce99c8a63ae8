// Work on the threads that torch's operators use.
//
// In the middle of a training those are awake: they wait for the next operator in a busy loop, for
// some milliseconds, so that they begin at once, and threads of our own would share their cores.
#pragma once

#include <cstddef>
#include <functional>

namespace ptsave {

// Below this one thread is as fast.
inline constexpr std::size_t kMinSharedNbytes = std::size_t{512} << 10;

// Calls `work` for 0 .. n - 1 in up to `n_threads` runs of neighbours, side by side unless torch
// has one thread (torch.set_num_threads) or this is one of its threads.  Rethrows an exception.
void share_out(std::size_t n, std::size_t n_threads, const std::function<void(std::size_t)>& work);

}  // namespace ptsave
