#include "core/memory/pages.h"

#include <gtest/gtest.h>
#include <unistd.h>

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

}  // namespace
}  // namespace ptsave
