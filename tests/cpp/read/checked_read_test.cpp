// Files of placed pieces with checksums of their blocks: written, read in part, damaged.
#include "core/read/checked_read.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/scratch.h"
#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/write/file_plan.h"

namespace ptsave {
namespace {

using namespace common;

constexpr std::uint64_t kBlock = kCheckedBlockNbytes;

class Checked : public testing::TestWithParam<bool> {
 protected:
  Checked() : path_(folder_ / "file") {
    // Small and large ones, with and without gaps, over the ends of blocks, windows and chunks.
    std::uint64_t offset = 0;
    pieces_.reserve(16);  // short strings move with the vector
    for (const std::uint64_t nbytes : {10ULL, 0ULL, 100ULL, 4096ULL, 5000ULL, 9'000'000ULL, 3ULL}) {
      pieces_.push_back(noise(nbytes, static_cast<unsigned>(pieces_.size())));
      placed_.push_back({offset, nbytes, data_of(pieces_.back())});
      offset += nbytes + (pieces_.size() % 2) * 777;
    }
    expected_.resize(CheckedBody::nbytes_of(placed_));
    for (std::size_t i = 0; i < placed_.size(); ++i) {
      expected_.replace(placed_[i].offset, placed_[i].nbytes, pieces_[i]);
    }
  }

  void write() {
    CheckedPlan plan(placed_, nullptr);
    WriteOptions options{.n_threads = 3, .chunk_nbytes = 70'000, .n_direct_threads = 3};
    if (GetParam()) options.direct_nbytes = 1;
    plan.write_file({path_, path_, false}, options, kNoPoll);
    crcs_.assign(plan.block_crcs().begin(), plan.block_crcs().end());
    nbytes_ = plan.nbytes();
  }

  std::shared_ptr<RangeFiles> open() const {
    std::vector<ByteSource> files;
    const auto direct = GetParam() ? DirectReads::kAlways : DirectReads::kNever;
    files.emplace_back(File::open_for_reading(path_), 0, direct);
    return std::make_shared<RangeFiles>(std::move(files), 3);
  }

  std::vector<DamagedBlock> read(std::string& out,
                                 const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ranges,
                                 std::uint64_t max_gap) const {
    if (GetParam()) drop_from_page_cache(path_);
    out.assign(expected_.size(), '\0');
    std::vector<FileRange> wanted;
    for (const auto& [offset, nbytes] : ranges) {
      wanted.push_back({0, offset, nbytes, data_of(out) + offset, std::nullopt});
    }
    return CheckedRead(open(), wanted, {crcs_}, max_gap).run(3, kNoPoll);
  }

  const Folder folder_;
  const std::string path_;
  std::vector<std::string> pieces_;
  std::vector<PlacedPiece> placed_;
  std::string expected_;
  std::vector<std::uint32_t> crcs_;
  std::uint64_t nbytes_ = 0;
};

TEST_P(Checked, TheTableFollowsTheBlocks) {
  write();
  const std::string file = read_file(path_);
  EXPECT_EQ(file.size(), nbytes_);
  EXPECT_TRUE(file.starts_with(expected_));
  ASSERT_EQ(crcs_.size() * kBlock, expected_.size());
  for (std::size_t i = 0; i < crcs_.size(); ++i) {
    ASSERT_EQ(crcs_[i], crc32(0, expected_.data() + i * kBlock, kBlock)) << i;
  }
  EXPECT_EQ(0, std::memcmp(file.data() + expected_.size(), crcs_.data(), crcs_.size() * 4));
}

TEST_P(Checked, PartsAreReadFromWhereTheyAre) {
  write();
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges{{0, 1}, {5, 9000}, {4090, 12}};
  for (std::uint64_t at = 100'000; at < 9'000'000; at += 131'072) ranges.emplace_back(at, 16'384);
  ranges.emplace_back(3'000'000, 5'000'000);  // over some of those
  for (const std::uint64_t max_gap : {0ULL, 8192ULL, 65'536ULL, 10'000'000ULL}) {
    if (GetParam()) drop_from_page_cache(path_);
    std::deque<std::string> parts;  // a place for each: two threads may read what two ranges share
    std::vector<FileRange> wanted;
    for (const auto& [offset, nbytes] : ranges) {
      auto* const place = reinterpret_cast<std::byte*>(parts.emplace_back(nbytes, '\0').data());
      wanted.push_back({0, offset, nbytes, place, std::nullopt});
    }
    EXPECT_TRUE(CheckedRead(open(), wanted, {crcs_}, max_gap).run(3, kNoPoll).empty());
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const auto [offset, nbytes] = ranges[i];
      EXPECT_TRUE(parts[i] == expected_.substr(offset, nbytes)) << max_gap << " at " << offset;
    }
  }
}

TEST_P(Checked, TheBeginningIsInThePageCache) {
  write();
  for (const std::uint64_t n_cached : {1ULL, 262'144ULL, 300'000ULL, 3'000'000ULL}) {
    drop_from_page_cache(path_);
    std::string cached(n_cached, '\0');
    File::open_for_reading(path_).read_at(0, cached.data(), n_cached);
    std::vector<ByteSource> files;
    files.emplace_back(File::open_for_reading(path_), 0);
    std::string out(expected_.size(), '\0');
    auto* const place = data_of(out);
    CheckedRead all(std::make_shared<RangeFiles>(std::move(files), 3),
                    {{0, 0, expected_.size(), place, std::nullopt}}, {crcs_}, 0);
    EXPECT_TRUE(all.run(3, kNoPoll).empty());
    EXPECT_EQ(all.nbytes_read(), expected_.size());
    EXPECT_TRUE(out == expected_) << n_cached;
  }
}

TEST_P(Checked, OneFlippedBitIsFound) {
  write();
  std::string file = read_file(path_);
  file[5'000'000] ^= 4;
  write_file(path_, file);
  std::string out;
  const std::uint64_t block = 5'000'000 / kBlock * kBlock;
  const std::vector<DamagedBlock> expected{{0, block}};
  EXPECT_EQ(read(out, {{0, expected_.size()}}, 0), expected);
  EXPECT_EQ(read(out, {{block + kBlock - 1, 1}, {block, 1}}, 0), expected);
  EXPECT_TRUE(read(out, {{block + kBlock, 1}, {block - 1, 1}}, 0).empty());
}

TEST_P(Checked, RangesOutsideAreRefused) {
  write();
  std::string out;
  EXPECT_THROW(read(out, {{expected_.size(), 1}}, 0), IoError);
  EXPECT_THROW(read(out, {{~std::uint64_t{0}, 2}}, 0), IoError);
  const FileRange other{1, 0, 1, nullptr, std::nullopt};
  EXPECT_THROW(CheckedRead(open(), {other}, {crcs_}, 0), std::invalid_argument);
  EXPECT_THROW(CheckedRead(open(), {}, {}, 0), std::invalid_argument);
}

TEST(CheckedPlan, PiecesInAnotherOrderAreRefused) {
  const std::string text = "text";
  EXPECT_THROW(CheckedPlan({{10, 4, data_of(text)}, {0, 4, data_of(text)}}, nullptr),
               std::invalid_argument);
  EXPECT_THROW(CheckedPlan({{0, 4, data_of(text)}, {3, 4, data_of(text)}}, nullptr),
               std::invalid_argument);
  EXPECT_EQ(CheckedPlan({}, nullptr).nbytes(), 0);
}

INSTANTIATE_TEST_SUITE_P(Files, Checked, testing::Bool());

}  // namespace
}  // namespace ptsave
