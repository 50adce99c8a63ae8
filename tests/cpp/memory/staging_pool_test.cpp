#include "core/memory/staging_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "common/scratch.h"

namespace ptsave {
namespace {

using namespace common;

void fill(const StagingBlock& block, int value) { std::memset(block.data, value, block.nbytes); }

bool holds(const StagingBlock& block, int value) {
  return std::all_of(block.data, block.data + block.nbytes,
                     [value](std::byte b) { return b == std::byte(value); });
}

TEST(StagingPool, BlocksArePageAlignedDisjointAndWritable) {
  StagingPool pool;
  const std::vector<std::size_t> sizes{1, 4096, 4097, 3 * kMiB, 2 * kMiB, 5};
  const auto blocks = pool.acquire(sizes);
  ASSERT_EQ(blocks.size(), sizes.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_GE(blocks[i].nbytes, sizes[i]);
    EXPECT_LT(blocks[i].nbytes, sizes[i] + page_nbytes());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks[i].data) % page_nbytes(), 0u);
    fill(blocks[i], static_cast<int>(i));
  }
  for (std::size_t i = 0; i < blocks.size(); ++i)
    EXPECT_TRUE(holds(blocks[i], static_cast<int>(i)));
  EXPECT_EQ(pool.statistics().n_mappings, 1u);
}

TEST(StagingPool, NothingIsMappedForNothing) {
  StagingPool pool;
  EXPECT_TRUE(pool.acquire({}).empty());
  EXPECT_EQ(pool.statistics().n_mappings, 0u);
}

TEST(StagingPool, OnlyMemoryThatWasMappedForItIsNew) {
  StagingPool pool;
  EXPECT_TRUE(pool.acquire({kMiB}).front().is_new);
  EXPECT_FALSE(pool.acquire({kMiB / 2}).front().is_new);
  EXPECT_TRUE(pool.acquire({4 * kMiB}).front().is_new);
}

TEST(StagingPool, MemoryIsUsedAgainWhateverTheSizes) {
  StagingPool pool;
  const std::byte* data = nullptr;
  {
    const auto blocks = pool.acquire({8 * kMiB, 4 * kMiB, 4 * kMiB});
    for (const StagingBlock& block : blocks) fill(block, 1);
    data = blocks[0].data;
  }
  EXPECT_TRUE(is_resident(data));
  EXPECT_EQ(pool.statistics().used_nbytes, 0u);
  for (const auto& sizes : std::vector<std::vector<std::size_t>>{{16 * kMiB},
                                                                 {kMiB, 15 * kMiB},
                                                                 {3 * kMiB, 3 * kMiB, 3 * kMiB},
                                                                 {1, 1, 1},
                                                                 {16 * kMiB}}) {
    EXPECT_EQ(pool.acquire(sizes)[0].data, data);
  }
  EXPECT_EQ(pool.statistics().n_mappings, 1u);
  EXPECT_EQ(pool.statistics().mapped_nbytes, 16 * kMiB);
}

TEST(StagingPool, TheLastOwnerGivesTheBlockBack) {
  StagingPool pool;
  auto blocks = pool.acquire({kMiB});
  OwnerReference owner = blocks[0].owner;
  blocks.clear();
  EXPECT_EQ(pool.statistics().used_nbytes, kMiB);
  owner = OwnerReference();
  EXPECT_EQ(pool.statistics().used_nbytes, 0u);
}

TEST(StagingPool, GrowingDropsWhatDoesNotSuffice) {
  StagingPool pool;
  pool.acquire({8 * kMiB});
  const auto blocks = pool.acquire({32 * kMiB});
  EXPECT_EQ(pool.statistics().mapped_nbytes, 32 * kMiB);
  EXPECT_EQ(pool.statistics().n_mappings, 2u);
}

TEST(StagingPool, GrowingUsesWhatIsFreeFirst) {
  StagingPool pool;
  pool.acquire({8 * kMiB});
  const auto blocks = pool.acquire({4 * kMiB, 4 * kMiB, 4 * kMiB});
  EXPECT_EQ(pool.statistics().mapped_nbytes, 12 * kMiB);
  EXPECT_EQ(pool.statistics().used_nbytes, 12 * kMiB);
}

TEST(StagingPool, TrimUnmapsWholeMappings) {
  StagingPool pool;
  auto blocks = pool.acquire({8 * kMiB});
  fill(blocks[0], 1);
  const std::byte* const data = blocks[0].data;
  pool.trim();
  EXPECT_TRUE(holds(blocks[0], 1));
  blocks.clear();
  pool.trim();
  EXPECT_FALSE(is_mapped(data));
  EXPECT_EQ(pool.statistics().mapped_nbytes, 0u);
  pool.trim();
}

TEST(StagingPool, TrimDiscardsTheRestOfAMappingInUse) {
  StagingPool pool;
  auto blocks = pool.acquire({4 * kMiB, 4 * kMiB});
  for (const StagingBlock& block : blocks) fill(block, 1);
  const std::byte* const freed = blocks[0].data;
  blocks[0] = StagingBlock{};
  pool.trim();
  EXPECT_FALSE(is_resident(freed));
  EXPECT_TRUE(holds(blocks[1], 1));
  const auto again = pool.acquire({4 * kMiB});
  EXPECT_EQ(again[0].data, freed);
  fill(again[0], 2);
  EXPECT_TRUE(holds(blocks[1], 1));
}

TEST(StagingPool, FailureTakesNothing) {
  StagingPool pool;
  pool.acquire({4 * kMiB});
  EXPECT_THROW(pool.acquire({kMiB, std::numeric_limits<std::size_t>::max() / 4}), std::bad_alloc);
  EXPECT_EQ(pool.statistics().used_nbytes, 0u);
  EXPECT_EQ(pool.acquire({4 * kMiB}).size(), 1u);
}

// Blocks of random sizes come and go; none may ever share a byte with another.
TEST(StagingPool, RandomUse) {
  StagingPool pool;
  std::mt19937 random(7);
  std::vector<std::pair<StagingBlock, int>> blocks;
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::size_t> sizes(random() % 4);
    for (std::size_t& size : sizes) size = 1 + random() % (64u << 10);
    for (StagingBlock& block : pool.acquire(sizes)) {
      fill(block, round % 256);
      blocks.emplace_back(std::move(block), round % 256);
    }
    while (blocks.size() > random() % 24) {
      const std::size_t i = random() % blocks.size();
      ASSERT_TRUE(holds(blocks[i].first, blocks[i].second));
      std::swap(blocks[i], blocks.back());
      blocks.pop_back();
    }
    if (random() % 50 == 0) pool.trim();
  }
  blocks.clear();
  EXPECT_EQ(pool.statistics().used_nbytes, 0u);
  pool.trim();
  EXPECT_EQ(pool.statistics().mapped_nbytes, 0u);
}

TEST(StagingPool, Threads) {
  StagingPool pool;
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&pool, number] {
      for (std::size_t round = 0; round < 200; ++round) {
        const auto blocks = pool.acquire({1 + round * 100, 5000});
        for (const StagingBlock& block : blocks) fill(block, number);
        if (round % 20 == 0) pool.trim();
        for (const StagingBlock& block : blocks) EXPECT_TRUE(holds(block, number));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.statistics().used_nbytes, 0u);
}

TEST(StagingPool, AChildBeginsWithAnEmptyPool) {
  StagingPool& pool = StagingPool::instance();
  auto blocks = pool.acquire({4 * kMiB, 4 * kMiB});
  for (const StagingBlock& block : blocks) fill(block, 1);
  const auto begin = [&] {
    EXPECT_EQ(pool.statistics().mapped_nbytes, 0u);
    EXPECT_FALSE(is_mapped(blocks[0].data));
    {
      const auto own = pool.acquire({4 * kMiB});
      fill(own[0], 2);
      blocks.clear();  // the parent's
      EXPECT_TRUE(holds(own[0], 2));
      EXPECT_EQ(pool.statistics().used_nbytes, 4 * kMiB);
    }
    pool.trim();
    EXPECT_EQ(pool.statistics().mapped_nbytes, 0u);
  };
  EXPECT_EQ(in_child(begin), 0);
  for (const StagingBlock& block : blocks) EXPECT_TRUE(holds(block, 1));
  blocks.clear();
  pool.trim();
}

// Rarely goes wrong where a thread makes what the child of another thread waits for.
TEST(StagingPool, IsThereForAChildOfAProcessThatHasJustBegun) {
  const auto use = [] { StagingPool::instance().trim(); };
  const auto fork_beside_first_use = [&] {
    std::thread first(use);
    EXPECT_EQ(in_child(use), 0);
    first.join();
  };
  for (int i = 0; i < 50; ++i) ASSERT_EQ(in_child(fork_beside_first_use), 0);
}

}  // namespace
}  // namespace ptsave
