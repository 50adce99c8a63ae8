#include "core/memory/buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/scratch.h"

namespace ptsave {
namespace {

using namespace common;

bool all_zero(const std::byte* data, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; ++i) {
    if (data[i] != std::byte{0}) return false;
  }
  return true;
}

class MappingSizes : public testing::TestWithParam<std::size_t> {};

TEST_P(MappingSizes, AreZeroFilledAlignedAndWritable) {
  const std::size_t nbytes = GetParam();
  const Mapping mapping(nbytes);
  ASSERT_GE(mapping.nbytes(), nbytes);
  EXPECT_EQ(mapping.nbytes() % page_nbytes(), 0u);
  const std::size_t alignment = nbytes >= kHugePageNbytes ? kHugePageNbytes : page_nbytes();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapping.data()) % alignment, 0u);
  EXPECT_TRUE(all_zero(mapping.data(), mapping.nbytes()));
  std::memset(mapping.data(), 1, mapping.nbytes());
}

INSTANTIATE_TEST_SUITE_P(All, MappingSizes,
                         testing::Values(1, page_nbytes() - 1, page_nbytes(), page_nbytes() + 1,
                                         kHugePageNbytes - page_nbytes(), kHugePageNbytes - 1,
                                         kHugePageNbytes, kHugePageNbytes + 1,
                                         5 * kHugePageNbytes + 12345));

TEST(Mapping, OfNothingHoldsNothing) {
  const Mapping mapping(0);
  EXPECT_EQ(mapping.data(), nullptr);
  EXPECT_EQ(mapping.nbytes(), 0u);
  mapping.discard(0, 0);
}

TEST(Mapping, MovesItsMemory) {
  Mapping first(page_nbytes());
  std::byte* const data = first.data();
  Mapping second(std::move(first));
  EXPECT_EQ(second.data(), data);
  Mapping third;
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third.nbytes(), page_nbytes());
  EXPECT_TRUE(is_mapped(data));
  third = Mapping();
  EXPECT_EQ(third.data(), nullptr);
  EXPECT_FALSE(is_mapped(data));
}

TEST(Mapping, LeavesNoAddressSpaceBehind) {
  // Trimming to a huge page must give both ends back: else this needs 400 GiB of addresses.
  const auto vm_pages = [] { return std::stoull(read_file("/proc/self/statm")); };
  const auto before = vm_pages();
  for (int i = 0; i < 200; ++i) const Mapping mapping(std::size_t{1} << 31);
  EXPECT_LT(vm_pages(), before + (std::size_t{1} << 31) / page_nbytes());
}

TEST(Mapping, ThatIsTooLargeIsBadAlloc) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  EXPECT_THROW(Mapping{kMost}, std::bad_alloc);
  EXPECT_THROW(Mapping{std::size_t{1} << 60}, std::bad_alloc);
}

TEST(Mapping, DiscardsWholePagesOnly) {
  constexpr std::size_t kPages = 8;
  const Mapping mapping(kPages * page_nbytes());
  std::memset(mapping.data(), 7, mapping.nbytes());
  mapping.discard(page_nbytes() + 1, 4 * page_nbytes() + 5);
  for (std::size_t page = 0; page < kPages; ++page) {
    const std::byte expected{static_cast<unsigned char>(page == 2 || page == 3 ? 0 : 7)};
    for (std::size_t i = 0; i < page_nbytes(); ++i) {
      ASSERT_EQ(mapping.data()[page * page_nbytes() + i], expected) << page << " " << i;
    }
  }
  mapping.discard(5 * page_nbytes() + 1, 6 * page_nbytes() - 1);  // no whole page
  EXPECT_EQ(mapping.data()[5 * page_nbytes() + 1], std::byte{7});
}

TEST(Mapping, PopulatesThePagesOfAnyRange) {
  const Mapping mapping(8 * page_nbytes());
  mapping.populate(2 * page_nbytes() + 1, 3 * page_nbytes() + 1);
  if (!is_resident(mapping.data() + 2 * page_nbytes())) GTEST_SKIP() << "an old kernel";
  EXPECT_FALSE(is_resident(mapping.data() + page_nbytes()));
  EXPECT_TRUE(is_resident(mapping.data() + 3 * page_nbytes()));
  EXPECT_FALSE(is_resident(mapping.data() + 4 * page_nbytes()));
}

TEST(Mapping, PopulatesByTheBetterKindOfPage) {
  FreshPages& pages = FreshPages::of_process();
  constexpr FreshPages::Time kNever = std::chrono::hours{24 * 365 * 100};
  const auto make_better = [&](PageKind kind) {
    for (int i = 0; pages.better() != kind && i < 1000; ++i) {
      pages.took(PageKind::kHuge, std::chrono::seconds{kind == PageKind::kHuge ? 0 : 1}, kNever);
    }
  };
  make_better(PageKind::kSmall);
  const Mapping mapping(8 * kHugePageNbytes);
  ASSERT_EQ(pages.better(), PageKind::kSmall);
  mapping.populate(page_nbytes() + 1, 3 * kHugePageNbytes + 1);
  if (!is_resident(mapping.data() + page_nbytes())) GTEST_SKIP() << "an old kernel";
  EXPECT_FALSE(is_resident(mapping.data()));
  EXPECT_TRUE(is_resident(mapping.data() + 3 * kHugePageNbytes));
  EXPECT_FALSE(is_resident(mapping.data() + 3 * kHugePageNbytes + page_nbytes()));
  make_better(PageKind::kHuge);
  mapping.populate(4 * kHugePageNbytes, 6 * kHugePageNbytes);
  EXPECT_TRUE(is_resident(mapping.data() + 6 * kHugePageNbytes - 1));
  EXPECT_FALSE(is_resident(mapping.data() + 6 * kHugePageNbytes));
}

TEST(Mapping, DiscardedMemoryGoesBackToTheSystem) {
  const Mapping mapping(4 * kHugePageNbytes);
  std::memset(mapping.data(), 7, mapping.nbytes());
  mapping.discard(kHugePageNbytes, 3 * kHugePageNbytes);
  EXPECT_TRUE(is_resident(mapping.data()));
  EXPECT_FALSE(is_resident(mapping.data() + kHugePageNbytes));
  EXPECT_FALSE(is_resident(mapping.data() + 3 * kHugePageNbytes - page_nbytes()));
  EXPECT_TRUE(is_resident(mapping.data() + 3 * kHugePageNbytes));
}

TEST(BufferPool, LendsDistinctBuffers) {
  BufferPool pool(3, 5000);
  const BufferPool::Lease a(pool);
  const BufferPool::Lease b(pool);
  const BufferPool::Lease c(pool);
  std::set<std::byte*> buffers;
  for (const BufferPool::Lease* lease : {&a, &b, &c}) {
    std::memset(lease->data(), 1, 5000);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(lease->data()) % page_nbytes(), 0u);
    for (std::byte* other : buffers) EXPECT_GE(std::abs(lease->data() - other), 5000);
    buffers.insert(lease->data());
  }
}

TEST(BufferPool, LendsAgainWhatCameBack) {
  BufferPool pool(1, 1);
  std::byte* first = nullptr;
  {
    const BufferPool::Lease lease(pool);
    first = lease.data();
  }
  const BufferPool::Lease lease(pool);
  EXPECT_EQ(lease.data(), first);
}

TEST(BufferPool, OfNothingIsAllowed) { const BufferPool pool(0, 4096); }

TEST(BufferPool, NeverLendsMoreThanItHas) {
  constexpr int kCount = 3;
  BufferPool pool(kCount, 4096);
  std::atomic<int> n_out{0};
  std::atomic<bool> exceeded{false};
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const BufferPool::Lease lease(pool);
        if (n_out.fetch_add(1) >= kCount) exceeded = true;
        // Two holders of one buffer are a data race that ThreadSanitizer reports.
        std::memset(lease.data(), t, 64);
        n_out.fetch_sub(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(exceeded);
}

TEST(StreamCopy, CopiesExactlyTheBytes) {
  std::mt19937 random(7);
  std::vector<std::byte> source(900 * kKiB);
  std::ranges::generate(source, [&] { return std::byte(random()); });
  std::vector<std::size_t> sizes{
      0, 1, 63, 64, 65, 4096, 256 * kKiB - 1, 256 * kKiB, 256 * kKiB + 1, 272 * kKiB, 800 * kKiB};
  for (int i = 0; i < 40; ++i) sizes.push_back(random() % (800 * kKiB));
  for (const std::size_t nbytes : sizes) {
    const std::size_t from = random() % 200;
    const std::size_t to = random() % 200;
    std::vector<std::byte> target(nbytes + 400, std::byte{0xa5});
    stream_copy(target.data() + to, source.data() + from, nbytes);
    std::vector<std::byte> expected(nbytes + 400, std::byte{0xa5});
    std::copy_n(source.data() + from, nbytes, expected.data() + to);
    ASSERT_EQ(target, expected) << nbytes << " bytes from " << from << " to " << to;
  }
}

TEST(StreamCopy, AcceptsNothing) { stream_copy(nullptr, nullptr, 0); }

}  // namespace

}  // namespace ptsave
