#include "core/io/read_slots.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace ptsave {
namespace {

// The most threads that had a slot at a time, of `n_threads` that take one again and again.
int most_at_once(std::size_t n_threads) {
  ReadSlots slots(n_threads);
  std::atomic<int> now{0};
  std::atomic<int> most{0};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < n_threads; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 200; ++k) {
        const ReadSlots::Slot slot(slots);
        const int mine = ++now;
        for (int seen = most.load(); mine > seen && !most.compare_exchange_weak(seen, mine);) {
        }
        std::this_thread::yield();
        --now;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return most;
}

TEST(ReadSlots, HalfOfTheThreadsAtATime) {
  for (const std::size_t n_threads : {2u, 5u, 12u}) {
    EXPECT_LE(most_at_once(n_threads), static_cast<int>(n_threads / 2));
  }
}

TEST(ReadSlots, AtLeastOne) {
  for (const std::size_t n_threads : {0u, 1u}) {
    ReadSlots slots(n_threads);
    for (int i = 0; i < 3; ++i) const ReadSlots::Slot slot(slots);
  }
  EXPECT_EQ(most_at_once(1), 1);
}

}  // namespace
}  // namespace ptsave
