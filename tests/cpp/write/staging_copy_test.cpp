// A copy into staging memory and a writer that meet.
#include "core/write/staging_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/scratch.h"
#include "core/memory/pages.h"

namespace ptsave {
namespace {

using namespace common;

const StagingCopy::WhenSlow kWriterThatNeverComes = [] { return true; };

class Copying : public testing::Test {
 protected:
  Copying() {
    std::size_t at = 0;
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      originals_.emplace_back(kSizes[i], static_cast<char>('a' + i));
      std::memset(originals_.back().data(), static_cast<int>('A' + i),
                  std::min<std::size_t>(kSizes[i], 100));
      copying_.add(memory_.data() + at, kSizes[i], memory_);
      places_.push_back(memory_.data() + at);
      at += kSizes[i] + 64;
    }
  }

  std::string read(std::size_t part) {
    std::string bytes;
    for (std::size_t at = 0; at < kSizes[part]; at += kMiB) {
      copying_.read(
          places_[part] + at, std::min(kMiB, kSizes[part] - at),
          [&](std::span<const std::byte> piece) { bytes += text_of(piece.data(), piece.size()); });
    }
    return bytes;
  }

  const std::vector<std::size_t> kSizes{5, 9 * kMiB + 1, 100, 20 * kMiB, 3};
  Mapping memory_{30 * kMiB};
  std::vector<std::string> originals_;
  std::vector<std::byte*> places_;
  std::function<void(std::size_t part)> before_use_ = [](std::size_t /*part*/) {};
  StagingCopy copying_{[this](std::size_t part) {
    before_use_(part);
    return data_of(originals_[part]);
  }};
};

TEST_F(Copying, CopiesAllWithoutAWriter) {
  copying_.run(2, kNoPoll, kWriterThatNeverComes);
  EXPECT_EQ(copying_.nbytes_copied(), 29 * kMiB + 109);
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    EXPECT_EQ(std::memcmp(places_[i], originals_[i].data(), kSizes[i]), 0) << i;
  }
}

TEST_F(Copying, MeetsAWriterAndNeedsNoOriginalAfter) {
  const std::vector<std::string> expected = originals_;
  for (const std::size_t n_threads : {std::size_t{0}, std::size_t{1}, std::size_t{3}}) {
    std::vector<std::string> written(kSizes.size());
    StagingCopy copying([&](std::size_t part) { return data_of(originals_[part]); });
    for (std::size_t i = 0; i < kSizes.size(); ++i) copying.add(places_[i], kSizes[i], memory_);
    std::thread writer([&] {
      for (std::size_t i = 0; i < kSizes.size(); ++i) {
        char front = 0;
        copying.peek(places_[i], std::as_writable_bytes(std::span(&front, 1)));
        EXPECT_EQ(front, expected[i].front());
        copying.read(places_[i], kSizes[i], [&](std::span<const std::byte> piece) {
          written[i] += text_of(piece.data(), piece.size());
        });
      }
      copying.close();
    });
    copying.run(n_threads, kNoPoll, kWriterThatNeverComes);
    for (std::string& original : originals_) std::ranges::fill(original, '?');
    writer.join();
    EXPECT_TRUE(written == expected) << n_threads;
    originals_ = expected;
  }
}

TEST_F(Copying, TheWriterTakesOriginalsThatAreNotCopied) {
  // The copy stops in front of its first unit until the writer has the first part.
  std::atomic<bool> is_read = false;
  const std::thread::id here = std::this_thread::get_id();
  before_use_ = [&](std::size_t part) {
    if (part == 3 && std::this_thread::get_id() != here) {
      while (!is_read) std::this_thread::yield();
    }
  };
  std::thread copier([&] { copying_.run(1, kNoPoll, kWriterThatNeverComes); });
  EXPECT_EQ(read(0), originals_[0]);
  EXPECT_EQ(read(1), originals_[1]);
  EXPECT_EQ(copying_.nbytes_copied(), 0);
  is_read = true;
  for (std::size_t i = 2; i < kSizes.size(); ++i) EXPECT_EQ(read(i), originals_[i]);
  copier.join();
  EXPECT_LE(copying_.nbytes_copied(), 20 * kMiB + 103);
}

TEST_F(Copying, AFailedCopyFailsTheWriter) {
  before_use_ = [](std::size_t part) {
    if (part == 3) throw std::runtime_error("no such storage");
  };
  EXPECT_THROW(copying_.run(1, kNoPoll, kWriterThatNeverComes), std::runtime_error);
  EXPECT_THROW(read(0), std::runtime_error);
  EXPECT_THROW(read(4), std::runtime_error);
}

TEST_F(Copying, AWriterThatFailsEndsTheCopy) {
  std::thread writer([&] {
    EXPECT_THROW(copying_.read(places_[0], 5,
                               [](std::span<const std::byte> /*piece*/) {
                                 throw std::runtime_error("no room");
                               }),
                 std::runtime_error);
    copying_.close();
  });
  copying_.run(1, kNoPoll, kWriterThatNeverComes);
  writer.join();
}

TEST_F(Copying, OriginalsAreNotReadAfterIt) {
  std::thread writer([&] { read(0); });
  copying_.run(1, kNoPoll, kWriterThatNeverComes);
  writer.join();
  EXPECT_NO_THROW(read(4));
  const std::string other = "other memory";
  copying_.read(data_of(other), other.size(),
                [&](std::span<const std::byte> piece) { EXPECT_EQ(piece.size(), other.size()); });
}

// Fresh memory that costs the processor `cost_` for each piece, and half of that for every fourth,
// while `is_expensive_`: so the threads never end a piece at the same time, and one of them is amid
// a piece when the copy asks for a writer. The writer's head start is 64 pieces of each thread.
class SlowCopying : public Copying {
 protected:
  using Clock = std::chrono::steady_clock;

  SlowCopying() {
    const std::thread::id here = std::this_thread::get_id();
    before_use_ = [this, here](std::size_t /*part*/) {
      if (std::this_thread::get_id() == here) return;
      if (is_expensive_) {
        const int piece = n_pieces_++;
        spend(piece % 4 == 1 ? cost_ / 2 : cost_);
        while (piece == piece_until_asked_ && is_expensive_) std::this_thread::yield();
      }
      if (!fails_.exchange(false)) return;
      std::this_thread::sleep_for(cost_);  // until the other thread waits for the writer
      throw std::runtime_error("no such storage");
    };
  }

  static void spend(std::chrono::nanoseconds time) {
    const auto begin = thread_cpu_time();
    while (thread_cpu_time() - begin < time) continue;
  }

  static constexpr std::uint64_t kUnderWay = 4 * kMiB;  // by two threads
  // A thread that waits until the copy is worthwhile waits longer than 16 pairs of pieces cost.
  static constexpr std::chrono::milliseconds kCost{200};
  static constexpr std::chrono::milliseconds kNoWait = 15 * (kCost + kCost / 2);

  std::chrono::milliseconds cost_{60};
  std::atomic<bool> is_expensive_ = true;
  std::atomic<int> n_pieces_ = 0;
  int piece_until_asked_ = -1;  // this piece lasts as long as memory is expensive
  std::atomic<bool> fails_ = false;
};

TEST_F(SlowCopying, GivesWayToAFasterWriter) {
  std::vector<std::string> written(kSizes.size());
  std::uint64_t nbytes_before = 0;
  int n_calls = 0;
  const StagingCopy::WhenSlow when_slow = [&] {
    ++n_calls;
    nbytes_before = copying_.nbytes_copied();
    std::this_thread::sleep_for(4 * cost_);
    for (std::size_t i = 0; i < kSizes.size(); ++i) written[i] = read(i);
    copying_.close();
    return true;
  };
  copying_.run(2, kNoPoll, when_slow);
  EXPECT_EQ(n_calls, 1);
  EXPECT_LE(copying_.nbytes_copied(), nbytes_before + kUnderWay);
  EXPECT_TRUE(written == originals_);
}

TEST_F(SlowCopying, GoesOnWhereTheWriterIsSlower) {
  cost_ = std::chrono::milliseconds{8};
  copying_.run(2, kNoPoll, kWriterThatNeverComes);
  EXPECT_EQ(copying_.nbytes_copied(), 29 * kMiB + 109);
}

TEST_F(SlowCopying, WaitsForNobodyWithoutAWriter) {
  cost_ = kCost;
  Clock::time_point asked;
  copying_.run(2, kNoPoll, [&] {
    asked = Clock::now();
    is_expensive_ = false;
    return false;
  });
  EXPECT_LT(Clock::now() - asked, kNoWait);
  EXPECT_EQ(copying_.nbytes_copied(), 29 * kMiB + 109);
}

TEST_F(SlowCopying, NoErrorWaitsForTheWriter) {
  cost_ = kCost;
  piece_until_asked_ = 4;  // four pieces, of three units, show that memory is expensive
  for (const char* const from : {"poll", "when_slow", "copy"}) {
    n_pieces_ = 0;
    StagingCopy copying([&](std::size_t part) {
      before_use_(part);
      return data_of(originals_[part]);
    });
    for (std::size_t i = 0; i < kSizes.size(); ++i) copying.add(places_[i], kSizes[i], memory_);
    const auto fails = [from](const char* here) { return std::string(from) == here; };
    bool is_slow = false;
    is_expensive_ = true;
    Clock::time_point asked;
    const StagingCopy::WhenSlow when_slow = [&] {
      asked = Clock::now();
      is_slow = true;
      is_expensive_ = false;
      fails_ = fails("copy");
      if (fails("when_slow")) throw std::runtime_error("no memory");
      return true;
    };
    const Poll poll = [&] {
      if (is_slow && fails("poll")) throw std::runtime_error("interrupted");
    };
    EXPECT_THROW(copying.run(2, poll, when_slow), std::runtime_error) << from;
    EXPECT_LT(Clock::now() - asked, kNoWait) << from;
    EXPECT_THROW(copying.read(places_[0], 1, [](auto /*piece*/) {}), std::runtime_error) << from;
  }
}

}  // namespace
}  // namespace ptsave
