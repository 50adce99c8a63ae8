#include "core/hash/xxh3.h"

#include <gtest/gtest.h>

#include <string>

namespace ptsave {
namespace {

// The digests are those of the xxhsum command: printf ... | xxhsum -H2
TEST(Xxh3, HasTheDigestsOfTheCommand) {
  EXPECT_EQ(xxh3_128("", 0).hex(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(xxh3_128("abc", 3).hex(), "06b05ab6733a618578af5f94892f3950");
}

TEST(Xxh3, IsTheSameInPieces) {
  const std::string text(100'000, 'x');
  Xxh3Stream stream;
  stream.update(text.data(), 70'001);
  stream.update(text.data() + 70'001, text.size() - 70'001);
  EXPECT_EQ(stream.digest(), xxh3_128(text.data(), text.size()));
  EXPECT_NE(stream.digest(), xxh3_128(text.data(), text.size() - 1));
}

}  // namespace
}  // namespace ptsave
