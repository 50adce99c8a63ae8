#include "core/memory/fresh_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

namespace ptsave {
namespace {

using std::chrono::microseconds;
using Time = FreshPages::Time;

constexpr Time kFast = microseconds{170};
constexpr Time kSlow = microseconds{4500};
constexpr Time kSmall = microseconds{650};

// Memory whose pieces take a time that depends on their kind, and the time that all have taken.
struct Memory {
  Time huge;
  Time small;
  Time now{0};
  int n_huge = 0;

  void take(FreshPages& pages, int n_pieces) {
    for (int i = 0; i < n_pieces; ++i) {
      const PageKind kind = pages.choose(now);
      const Time time = kind == PageKind::kHuge ? huge : small;
      if (kind == PageKind::kHuge) ++n_huge;
      now += time;
      pages.took(kind, time, now);
    }
  }
};

TEST(FreshPages, AreHugeAtFirst) {
  FreshPages pages;
  EXPECT_EQ(pages.better(), PageKind::kHuge);
  EXPECT_EQ(pages.choose(Time{0}), PageKind::kHuge);
}

TEST(FreshPages, StayHugeWhileThatIsFast) {
  FreshPages pages;
  Memory memory{kFast, kSmall};
  memory.take(pages, 1000);
  EXPECT_EQ(memory.n_huge, 1000);
}

TEST(FreshPages, CostLittleMoreThanTheBetterKind) {
  for (const Time huge : {kFast, Time{microseconds{500}}, kSmall, kSlow / 2, kSlow, 10 * kSlow}) {
    for (const Time small : {kSmall, kSlow, 10 * kSlow}) {
      FreshPages pages;
      Memory memory{huge, small};
      memory.take(pages, 2000);
      EXPECT_LE(memory.now, 2000 * std::min(huge, small) * 110 / 100 + huge + small)
          << huge.count() << " " << small.count();
    }
  }
}

TEST(FreshPages, AreHugeAgainWhenThatHasBecomeFast) {
  FreshPages pages;
  Memory memory{kSlow, kSmall};
  memory.take(pages, 100);
  EXPECT_EQ(pages.better(), PageKind::kSmall);
  memory.huge = kFast;
  memory.take(pages, static_cast<int>(FreshPages::kRetryFactor * kSlow / kSmall) + 1);
  EXPECT_EQ(pages.better(), PageKind::kHuge);
}

TEST(FreshPages, StayHugeWhenOneOfManyIsSlow) {
  FreshPages pages;
  Memory memory{kFast, kSmall};
  memory.take(pages, 10);
  pages.took(PageKind::kHuge, kSlow, memory.now);
  EXPECT_EQ(pages.better(), PageKind::kHuge);
  for (int i = 0; i < 3; ++i) pages.took(PageKind::kHuge, kSlow, memory.now);
  EXPECT_EQ(pages.better(), PageKind::kSmall);
}

TEST(FreshPages, AreMeasuredByOneThreadAtATime) {
  FreshPages pages;
  pages.took(PageKind::kHuge, kSlow, Time{0});
  const Time later = 2 * FreshPages::kRetryFactor * kSlow;
  EXPECT_EQ(pages.choose(later), PageKind::kHuge);
  EXPECT_EQ(pages.choose(later), PageKind::kSmall);
}

}  // namespace
}  // namespace ptsave
