#include "core/memory/pages.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

#include "core/memory/buffer.h"

namespace ptsave {
namespace {

TEST(Align, RoundsToMultiples) {
  EXPECT_EQ(align_down(0, 4096), 0u);
  EXPECT_EQ(align_down(4095, 4096), 0u);
  EXPECT_EQ(align_down(4096, 4096), 4096u);
  EXPECT_EQ(align_up(0, 4096), 0u);
  EXPECT_EQ(align_up(1, 4096), 4096u);
  EXPECT_EQ(align_up(4096, 4096), 4096u);
  EXPECT_EQ(align_up((std::uint64_t{1} << 40) + 1, 64), (std::uint64_t{1} << 40) + 64);
}

TEST(Pages, AreTheSystems) {
  EXPECT_EQ(page_nbytes(), static_cast<std::size_t>(::getpagesize()));
  EXPECT_EQ(kHugePageNbytes % page_nbytes(), 0u);
}

class Pages : public testing::TestWithParam<std::uint64_t> {
 protected:
  const std::uint64_t page_ = GetParam();
};

TEST_P(Pages, InsideAreThoseOfWhichTheRangeHasEveryByte) {
  const std::uint64_t page = page_;
  EXPECT_EQ(pages_inside(0, page, page), (PageRange{0, page}));
  EXPECT_EQ(pages_inside(1, 3 * page, page), (PageRange{page, 3 * page}));
  EXPECT_EQ(pages_inside(page, 3 * page - 1, page), (PageRange{page, 2 * page}));
  EXPECT_EQ(pages_inside(page + 1, 4 * page + 5, page), (PageRange{2 * page, 4 * page}));
  for (const auto& [begin, end] : {PageRange{0, 0}, PageRange{1, page}, PageRange{0, page - 1},
                                   PageRange{1, 2 * page - 1}, PageRange{page + 1, page + 2}}) {
    EXPECT_TRUE(pages_inside(begin, end, page).empty()) << begin << " " << end;
  }
}

TEST_P(Pages, CoverThoseThatHoldAByteOfTheRange) {
  const std::uint64_t page = page_;
  EXPECT_EQ(pages_covering(0, 1, page), (PageRange{0, page}));
  EXPECT_EQ(pages_covering(page - 1, page + 1, page), (PageRange{0, 2 * page}));
  EXPECT_EQ(pages_covering(page, 2 * page, page), (PageRange{page, 2 * page}));
  EXPECT_EQ(pages_covering(3 * page + 17, 3 * page + 18, page), (PageRange{3 * page, 4 * page}));
}

TEST_P(Pages, AgreeWithTheirDefinitionByteByByte) {
  const std::uint64_t page = page_;
  const std::uint64_t n_pages = 3;
  for (std::uint64_t begin = 0; begin < n_pages * page; begin += page / 4 - 1) {
    for (std::uint64_t end = begin + 1; end <= n_pages * page; end += page / 4 + 1) {
      const PageRange inside = pages_inside(begin, end, page);
      const PageRange covering = pages_covering(begin, end, page);
      for (std::uint64_t at = 0; at < n_pages * page; at += page) {
        EXPECT_EQ(at >= inside.begin && at < inside.end, begin <= at && at + page <= end);
        EXPECT_EQ(at >= covering.begin && at < covering.end, begin < at + page && at < end);
      }
    }
  }
}

TEST_P(Pages, OfFarPositions) {
  const std::uint64_t far = std::uint64_t{1} << 62;
  EXPECT_EQ(pages_inside(far + 1, far + 2 * page_, page_),
            (PageRange{far + page_, far + 2 * page_}));
  EXPECT_EQ(pages_covering(far + 1, far + 2, page_), (PageRange{far, far + page_}));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Pages, testing::Values(4u << 10, 16u << 10, 64u << 10));

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
