#include "core/read/transfer_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "common/archive_file.h"
#include "core/memory/pages.h"
#include "core/read/reader.h"
#include "core/read/region.h"

namespace ptsave {
namespace {

using namespace archive_fixture;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;

// Large and small, neighbours that share a page of any size, and enough small ones for two
// segments.
std::string mixed_archive() {
  std::vector<std::size_t> sizes{3 * kMiB, 5, 100, kMiB + 1, 2 * kMiB - 1, 0, 60 * kKiB, 1};
  sizes.insert(sizes.end(), 300, 20 * kKiB + 7);
  sizes.insert(sizes.end(), {kMiB, kMiB, 9, kMiB, 17});
  return archive(records_of(sizes));
}

class PlanByPages : public testing::TestWithParam<std::size_t> {
 protected:
  // `every`: of the records, one in so many is wanted.
  TransferPlan plan(std::size_t every) const {
    const ArchiveIndex& index = reader_.index();
    std::vector<WantedRecord> wanted;
    for (std::size_t i = 0; i < index.records().size(); i += every) {
      if (index.records()[i].nbytes > 0) wanted.push_back({i, reader_.payload_offset(i)});
    }
    return plan_transfer(index, wanted, page_);
  }

  const std::size_t page_ = GetParam();
  const std::string bytes_ = mixed_archive();
  const ArchiveReader reader_{memory_source(bytes_)};
};

TEST_P(PlanByPages, PutsPayloadsWhereTheFileHasThemInItsPages) {
  for (const std::size_t every : {1u, 2u, 5u, 150u}) {
    const TransferPlan transfer = plan(every);
    EXPECT_EQ(transfer.mirror_nbytes % page_, 0u);
    for (const Slot& slot : transfer.slots) {
      EXPECT_EQ(slot.payload % page_, reader_.payload_offset(slot.index) % page_);
      EXPECT_LE(slot.end, transfer.mirror_nbytes);
    }
    for (const Chunk& chunk : transfer.chunks) {
      EXPECT_EQ(chunk.archive_offset % page_, chunk.begin % page_);
      EXPECT_EQ(chunk.begin % page_, 0u);
    }
  }
}

TEST_P(PlanByPages, CutsSegmentsAtPages) {
  for (const std::size_t every : {1u, 2u, 5u, 150u}) {
    const TransferPlan transfer = plan(every);
    const std::vector<std::size_t> begins = segment_begins(transfer.slots, page_);
    ASSERT_FALSE(begins.empty());
    EXPECT_EQ(begins.front(), 0u);
    EXPECT_TRUE(std::ranges::is_sorted(begins));
    EXPECT_TRUE(std::ranges::all_of(begins, [&](std::size_t at) { return at % page_ == 0; }));
    EXPECT_LE(begins.back(), transfer.mirror_nbytes);
  }
}

// Whatever else of the archive is kept: all of its pages but those that it shares.
TEST_P(PlanByPages, GivesALargeRecordSegmentsOfItsOwn) {
  const TransferPlan transfer = plan(1);
  const std::vector<std::size_t> begins = segment_begins(transfer.slots, page_);
  const auto segment_at = [&](std::size_t at) {
    return std::ranges::upper_bound(begins, at) - begins.begin();
  };
  const std::vector<Slot>& slots = transfer.slots;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].end - slots[i].header < kMiB) continue;
    const PageRange own =
        pages_inside(i > 0 ? slots[i - 1].end : 0,
                     i + 1 < slots.size() ? slots[i + 1].header : slots[i].end, page_);
    ASSERT_FALSE(own.empty());
    if (i > 0) {
      EXPECT_NE(segment_at(own.begin), segment_at(slots[i - 1].end - 1));
    }
    if (i + 1 < slots.size()) {
      EXPECT_NE(segment_at(own.end - 1), segment_at(slots[i + 1].header));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PlanByPages, testing::Values(4 * kKiB, 16 * kKiB, 64 * kKiB));

}  // namespace
}  // namespace ptsave
