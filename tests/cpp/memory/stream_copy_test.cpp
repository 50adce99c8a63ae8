#include "core/memory/stream_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

namespace ptsave {
namespace {

constexpr std::size_t kKiB = 1024;

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
