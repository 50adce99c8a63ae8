#include "core/pipeline/pipeline.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/scratch.h"

namespace {
// How many allocations of this thread succeed before one fails; -1: all of them.
thread_local int n_allocations_left = -1;
}  // namespace

// Not inlined: gcc would see std::free take what an inlined operator new has returned.
[[gnu::noinline]] void* operator new(std::size_t nbytes) {
  if (n_allocations_left == 0) {
    n_allocations_left = -1;
    throw std::bad_alloc();
  }
  if (n_allocations_left > 0) --n_allocations_left;
  if (void* const memory = std::malloc(nbytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*nbytes*/) noexcept {
  std::free(memory);
}

namespace ptsave {
namespace {

using namespace common;

using std::chrono::milliseconds;
using std::chrono::steady_clock;

struct Interrupt {};

class Pipeline : public testing::TestWithParam<std::size_t> {
 protected:
  std::size_t n_threads() const { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Threads, Pipeline, testing::Values(0, 1, 2, 3, 4, 8, 16));

TEST_P(Pipeline, DoesEveryChunkOnce) {
  constexpr std::size_t kChunks = 500;
  std::vector<std::atomic<int>> done(kChunks);
  ChunkPipeline pipeline(kChunks, n_threads(), [&](ChunkPipeline&, std::size_t i) { ++done[i]; });
  pipeline.finish(kNoPoll);
  for (const auto& times : done) EXPECT_EQ(times, 1);
}

TEST_P(Pipeline, MakesWorkVisibleToItsOwner) {
  std::vector<std::size_t> results(300);  // not atomic: ThreadSanitizer checks the hand-over
  ChunkPipeline pipeline(results.size(), n_threads(),
                         [&](ChunkPipeline&, std::size_t i) { results[i] = i * i; });
  pipeline.finish(kNoPoll);
  for (std::size_t i = 0; i < results.size(); ++i) EXPECT_EQ(results[i], i * i);
}

TEST_P(Pipeline, FinishesAtOnceWithoutChunks) {
  ChunkPipeline pipeline(0, n_threads(), [](ChunkPipeline&, std::size_t) { FAIL(); });
  pipeline.finish(kNoPoll);
  pipeline.finish(kNoPoll);
}

TEST_P(Pipeline, TakesChunksInOrder) {
  std::atomic<std::size_t> n_begun{0};
  std::atomic<bool> early{false};
  // Whoever works on chunk n may rely on all before n being taken.
  ChunkPipeline pipeline(300, n_threads(), [&](ChunkPipeline&, std::size_t i) {
    if (i > ++n_begun + n_threads()) early = true;
  });
  pipeline.finish(kNoPoll);
  EXPECT_FALSE(early);
}

TEST_P(Pipeline, WaitsForEarlierChunksWithoutDeadlock) {
  constexpr std::size_t kChunks = 400;
  for (int round = 0; round < 5; ++round) {
    std::vector<std::atomic<bool>> done(kChunks);
    std::vector<std::size_t> sums(kChunks);
    ChunkPipeline pipeline(kChunks, n_threads(), [&](ChunkPipeline& self, std::size_t i) {
      const std::size_t first = i - std::min<std::size_t>(i, 3);
      for (std::size_t c = first; c < i; ++c) {
        self.wait_in_worker([&] { return done[c].load(); });
      }
      sums[i] = std::accumulate(sums.begin() + static_cast<std::ptrdiff_t>(first),
                                sums.begin() + static_cast<std::ptrdiff_t>(i), i) %
                1000;
      done[i] = true;
      self.notify();
    });
    pipeline.finish(kNoPoll);
    for (std::size_t i = 4; i < kChunks; ++i) {
      ASSERT_EQ(sums[i], (i + sums[i - 1] + sums[i - 2] + sums[i - 3]) % 1000);
    }
  }
}

TEST_P(Pipeline, RethrowsAWorkersErrorAndStops) {
  std::atomic<std::size_t> n_done{0};
  ChunkPipeline pipeline(100000, n_threads(), [&](ChunkPipeline&, std::size_t i) {
    if (i == 10) throw std::runtime_error("chunk 10");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    ++n_done;
  });
  try {
    pipeline.finish(kNoPoll);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "chunk 10");
  }
  EXPECT_LT(n_done, 50000u);
  const std::size_t after_error = n_done;
  std::this_thread::sleep_for(milliseconds(5));
  EXPECT_EQ(n_done, after_error) << "something was still in flight when the error came out";
  EXPECT_THROW(pipeline.finish(kNoPoll), std::runtime_error) << "an error stays";
}

TEST_P(Pipeline, KeepsTheFirstError) {
  if (n_threads() < 2) return;  // takes two workers to disagree
  std::atomic<bool> second_may_fail{false};
  ChunkPipeline pipeline(2, n_threads(), [&](ChunkPipeline& self, std::size_t i) {
    if (i == 1) throw std::runtime_error("first");
    try {
      self.wait_in_worker([] { return false; });  // until the other one has failed
    } catch (const ChunkPipeline::Stopped&) {
      second_may_fail = true;
      throw std::runtime_error("second");
    }
  });
  try {
    pipeline.finish(kNoPoll);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  EXPECT_TRUE(second_may_fail) << "drained: the second worker has come to its end";
}

TEST_P(Pipeline, FreesWaitingWorkersWhenOneFails) {
  std::atomic<int> n_stopped{0};
  std::atomic<std::size_t> n_waiting{0};
  ChunkPipeline pipeline(16, n_threads(), [&](ChunkPipeline& self, std::size_t i) {
    if (i + 1 < n_threads()) {
      ++n_waiting;
      try {
        self.wait_in_worker([] { return false; });
      } catch (const ChunkPipeline::Stopped&) {
        ++n_stopped;
        throw;
      }
    }
    while (n_waiting + 1 < n_threads()) std::this_thread::yield();
    throw std::runtime_error("stop");
  });
  EXPECT_THROW(pipeline.finish(kNoPoll), std::runtime_error);
  EXPECT_EQ(n_stopped, static_cast<int>(n_threads()) - (n_threads() > 0 ? 1 : 0));
}

TEST_P(Pipeline, AnyTypeOfErrorComesOut) {
  ChunkPipeline pipeline(3, n_threads(), [](ChunkPipeline&, std::size_t) { throw 42; });
  EXPECT_THROW(pipeline.finish(kNoPoll), int);
}

TEST_P(Pipeline, AThrowingPollCancels) {
  std::atomic<std::size_t> n_done{0};
  const auto begin = steady_clock::now();
  {
    ChunkPipeline pipeline(10000, n_threads(), [&](ChunkPipeline&, std::size_t) {
      std::this_thread::sleep_for(milliseconds(1));
      ++n_done;
    });
    EXPECT_THROW(pipeline.finish([] { throw Interrupt(); }), Interrupt);
  }
  EXPECT_LT(steady_clock::now() - begin, milliseconds(1000));
  EXPECT_LT(n_done, 10000u);
}

TEST_P(Pipeline, AThrowingPollCancelsWorkersThatWait) {
  if (n_threads() == 0) return;  // without workers nobody may wait
  {
    ChunkPipeline pipeline(100, n_threads(), [](ChunkPipeline& self, std::size_t) {
      self.wait_in_worker([] { return false; });
    });
    EXPECT_THROW(pipeline.finish([] { throw Interrupt(); }), Interrupt);
  }
  SUCCEED() << "the destructor has returned";
}

TEST_P(Pipeline, PollsWhileItWaits) {
  if (n_threads() == 0) return;
  std::atomic<int> n_polls{0};
  ChunkPipeline pipeline(n_threads(), n_threads(), [](ChunkPipeline&, std::size_t) {
    std::this_thread::sleep_for(milliseconds(450));
  });
  pipeline.finish([&] { ++n_polls; });
  EXPECT_GE(n_polls, 2);
  EXPECT_LE(n_polls, 6);
}

TEST_P(Pipeline, PollsOnTheThreadThatWaits) {
  const std::thread::id owner = std::this_thread::get_id();
  ChunkPipeline pipeline(5, n_threads(), [](ChunkPipeline&, std::size_t) {
    std::this_thread::sleep_for(milliseconds(30));
  });
  pipeline.finish([&] { EXPECT_EQ(std::this_thread::get_id(), owner); });
}

TEST_P(Pipeline, WaitsUntilSomeChunksAreDone) {
  std::vector<std::atomic<bool>> done(64);
  ChunkPipeline pipeline(done.size(), n_threads(), [&](ChunkPipeline& self, std::size_t i) {
    done[i] = true;
    self.notify();
  });
  for (const std::size_t wanted : {std::size_t{3}, std::size_t{40}, std::size_t{0}}) {
    pipeline.wait_until([&] { return done[wanted].load(); }, kNoPoll);
    EXPECT_TRUE(done[wanted]);
  }
  pipeline.finish(kNoPoll);
  pipeline.wait_until([&] { return done[63].load(); }, kNoPoll);
}

TEST_P(Pipeline, AnErrorEndsAWaitForSomethingElse) {
  ChunkPipeline pipeline(4, n_threads(), [](ChunkPipeline&, std::size_t i) {
    if (i == 2) throw std::runtime_error("chunk 2");
  });
  EXPECT_THROW(pipeline.wait_until([] { return false; }, kNoPoll), std::runtime_error);
}

TEST_P(Pipeline, DestructionCancelsAndJoins) {
  const std::size_t before = common::n_threads();
  std::atomic<std::size_t> n_done{0};
  for (int round = 0; round < 20; ++round) {
    const ChunkPipeline pipeline(100000, n_threads(), [&](ChunkPipeline&, std::size_t) {
      ++n_done;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
  }
  EXPECT_LT(n_done, 20 * 100000u);
  EXPECT_TRUE(n_threads_becomes(before));
}

TEST_P(Pipeline, HasNoMoreThreadsThanChunks) {
  const std::size_t before = common::n_threads();
  std::atomic<bool> release{false};
  ChunkPipeline pipeline(2, n_threads(), [&](ChunkPipeline& self, std::size_t) {
    if (n_threads() > 0) self.wait_in_worker([&] { return release.load(); });
  });
  EXPECT_LE(common::n_threads(), before + 2);
  release = true;
  pipeline.notify();
  pipeline.finish(kNoPoll);
}

TEST(PipelineMemory, NoneForTheNextThread) {
  for (int n_allocations = 0; n_allocations < 6; ++n_allocations) {
    std::atomic<std::size_t> n_done{0};
    const auto work = [&](ChunkPipeline&, std::size_t) { ++n_done; };
    n_allocations_left = n_allocations;
    try {
      ChunkPipeline pipeline(100, 4, work);
      n_allocations_left = -1;
      pipeline.finish(kNoPoll);
      EXPECT_EQ(n_done, 100u);
    } catch (const std::bad_alloc&) {  // before there was any thread
      EXPECT_EQ(n_done, 0u);
    }
    n_allocations_left = -1;
  }
}

TEST(PipelineInline, RunsOnTheThreadThatWaitsInAscendingOrder) {
  const std::thread::id owner = std::this_thread::get_id();
  std::vector<std::size_t> order;
  int n_polls = 0;
  ChunkPipeline pipeline(10, 0, [&](ChunkPipeline&, std::size_t i) {
    EXPECT_EQ(std::this_thread::get_id(), owner);
    order.push_back(i);
  });
  EXPECT_TRUE(order.empty());
  pipeline.finish([&] { ++n_polls; });
  EXPECT_EQ(order.size(), 10u);
  EXPECT_TRUE(std::ranges::is_sorted(order));
  EXPECT_EQ(n_polls, 10) << "between chunks, so that each can be cancelled";
}

int nice_of_thread() {
  return ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
}

TEST(Pipeline, ThreadsInTheBackgroundGiveWay) {
  const int nice = nice_of_thread();
  for (const Priority priority : {Priority::kOfCaller, Priority::kBackground}) {
    std::atomic<int> found{-1};
    ChunkPipeline pipeline(
        1, 1, [&](ChunkPipeline&, std::size_t) { found = nice_of_thread(); }, priority);
    pipeline.finish(kNoPoll);
    EXPECT_EQ(found, priority == Priority::kBackground ? 19 : nice);
    EXPECT_EQ(nice_of_thread(), nice);  // of the caller
  }
}

TEST(PipelineStress, ManyShortLives) {
  for (std::size_t round = 0; round < 300; ++round) {
    const std::size_t n_threads = 1 + round % 4;
    const std::size_t failing = round % 7;
    std::atomic<std::size_t> n_done{0};
    auto pipeline =
        std::make_unique<ChunkPipeline>(6, n_threads, [&](ChunkPipeline& self, std::size_t i) {
          if (i == failing) throw std::runtime_error(std::to_string(i));
          self.wait_in_worker([] { return true; });
          ++n_done;
        });
    if (round % 3 == 0) {
      pipeline.reset();
    } else if (failing < 6) {
      EXPECT_THROW(pipeline->finish(kNoPoll), std::runtime_error);
    } else {
      pipeline->finish(kNoPoll);
      EXPECT_EQ(n_done, 6u);
    }
  }
}

}  // namespace
}  // namespace ptsave
