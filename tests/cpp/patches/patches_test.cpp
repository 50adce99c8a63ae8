#include "core/patches/patches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

namespace ptsave {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(n);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

Bytes patch_of(const Bytes& before, const Bytes& after) {
  Xxh3Stream digest;
  const ByteChanges changes(before, after, &digest);
  const Hash128 expected =
      before == after ? Xxh3Stream().digest() : xxh3_128(after.data(), after.size());
  EXPECT_EQ(digest.digest(), expected);
  EXPECT_EQ(ByteChanges(before, after, nullptr).patch_nbytes(), changes.patch_nbytes());
  Bytes patch(changes.patch_nbytes());
  changes.write_patch(patch.data());
  return patch;
}

void append(Bytes& to, std::uint32_t number) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&number);
  to.insert(to.end(), bytes, bytes + sizeof number);
}

Bytes patch_at(std::uint32_t count, const std::vector<std::uint32_t>& positions) {
  Bytes patch;
  append(patch, count);
  for (const std::uint32_t position : positions) append(patch, position);
  patch.resize(patch.size() + positions.size(), std::byte{7});
  return patch;
}

class Densities : public testing::TestWithParam<std::pair<std::size_t, unsigned>> {};

// The patch has each byte that differs, and applying it to any division of the old bytes, once or
// twice, gives the new bytes.
TEST_P(Densities, PatchesMakeTheNewBytes) {
  const auto [nbytes, percent] = GetParam();
  const Bytes before = random_bytes(nbytes, 1);
  Bytes after = before;
  std::mt19937 random(2);
  Bytes expected;
  std::vector<std::uint32_t> positions;
  for (std::size_t i = 0; i < nbytes; ++i) {
    if (random() % 100 >= percent) continue;
    after[i] ^= static_cast<std::byte>(1 + random() % 255);
    positions.push_back(static_cast<std::uint32_t>(i));
  }
  append(expected, static_cast<std::uint32_t>(positions.size()));
  for (const std::uint32_t position : positions) append(expected, position);
  for (const std::uint32_t position : positions) expected.push_back(after[position]);
  const Bytes bytes = patch_of(before, after);
  EXPECT_EQ(bytes, expected);

  const Patch patch(bytes);
  patch.check(nbytes);
  Bytes inverse(bytes.size());
  patch.write_inverse(before, inverse.data());
  Bytes undone = after;
  Patch(inverse).apply(0, 0, undone);
  EXPECT_EQ(undone, before);
  for (const std::size_t piece : {nbytes + 1, std::size_t{1000}, std::size_t{1}}) {
    Bytes target = before;
    for (const int round : {1, 2}) {
      for (std::size_t begin = 0; begin < nbytes; begin += piece) {
        const std::size_t n = std::min(piece, nbytes - begin);
        patch.apply(patch.find(begin), begin, std::span(target).subspan(begin, n));
      }
      EXPECT_EQ(target, after) << "pieces of " << piece << ", round " << round;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Densities,
                         testing::Values(std::pair{0, 0}, std::pair{1, 100}, std::pair{63, 50},
                                         std::pair{64, 100}, std::pair{65, 10}, std::pair{4096, 0},
                                         std::pair{100'000, 1}, std::pair{100'001, 100}));

TEST(Patch, RefusesSizesThatDoNotFitTheCount) {
  for (const Bytes& bytes :
       {Bytes{}, Bytes(3), patch_at(2, {0}), patch_at(0, {0}), patch_at(0xFFFFFFFF, {0, 1})}) {
    EXPECT_THROW(Patch{bytes}, std::invalid_argument);
  }
}

TEST(Patch, RefusesPositions) {
  for (const auto& [count, positions] :
       {std::pair{2U, std::vector{5U, 5U}}, {2U, {5U, 4U}}, {1U, {8U}}, {2U, {0U, 0xFFFFFFFFU}}}) {
    const Bytes bytes = patch_at(count, positions);
    EXPECT_THROW(Patch(bytes).check(8), std::invalid_argument);
  }
  const Bytes last = patch_at(2, {0, 0xFFFFFFFF});
  Patch(last).check(std::uint64_t{1} << 32);
}

TEST(Patch, MergesWithANewerOne) {
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp)
  for (int round = 0; round < 200; ++round) {
    std::vector<Bytes> states(3, Bytes(random() % 100));
    for (std::size_t i = 1; i < states.size(); ++i) {
      for (auto& value : states[i]) value = static_cast<std::byte>(random() % 3);
    }
    const Bytes older = patch_of(states[0], states[1]);
    const Bytes newer = patch_of(states[1], states[2]);
    Bytes merged(Patch(older).merged_nbytes(Patch(newer)));
    Patch(older).write_merged(Patch(newer), merged);
    Patch(merged).check(states[0].size());
    for (Bytes state : states) {  // of any of the versions
      Patch(merged).apply(0, 0, state);
      EXPECT_EQ(state, states.back());
    }
  }
}

TEST(Patch, WritesOnlyIntoItsTarget) {
  Bytes memory(32, std::byte{0});
  const Bytes bytes = patch_at(5, {9, 3, 30, 12, 0xFFFFFFFF});
  for (std::uint64_t begin = 0; begin < 20; ++begin) {
    const Patch patch(bytes);
    patch.apply(patch.find(begin), begin, std::span(memory).subspan(8, 8));
  }
  EXPECT_TRUE(
      std::all_of(memory.begin(), memory.begin() + 8, [](auto b) { return b == std::byte{0}; }));
  EXPECT_TRUE(
      std::all_of(memory.begin() + 16, memory.end(), [](auto b) { return b == std::byte{0}; }));
}

}  // namespace
}  // namespace ptsave
