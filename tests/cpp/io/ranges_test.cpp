// Ranges of several files, from the page cache, past it, and from file systems without direct I/O.
#include "core/io/ranges.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/scratch.h"
#include "core/base/error.h"

namespace ptsave {
namespace {

using namespace common;

constexpr std::size_t kFileNbytes = (std::size_t{5} << 20) + 4321;

// In any order: neighbours, gaps small and large, pieces of all sizes, the file's end.
const std::vector<std::pair<std::uint64_t, std::uint64_t>> kRanges{
    {kFileNbytes - 5, 5},
    {0, 3},
    {3, 4096},
    {5000, 0},
    {5000, 1},
    {70'000, 1},
    {400'000, 3 << 20},
    {(4 << 20) + 7, 900'000},
};

struct Source {
  std::string parent;
  bool cold;
  DirectReads direct = DirectReads::kAlways;
};

class RangeReadFrom : public testing::TestWithParam<Source> {
 protected:
  RangeReadFrom() : folder_(GetParam().parent) {
    for (std::size_t i = 0; i < 2; ++i) {
      contents_.push_back(noise(kFileNbytes, i));
      paths_.push_back(folder_ / std::to_string(i));
      write_file(paths_[i], contents_[i]);
      if (GetParam().cold) drop_from_page_cache(paths_[i]);
    }
  }

  std::shared_ptr<RangeFiles> open() const {
    std::vector<ByteSource> files;
    for (const std::string& path : paths_) {
      files.emplace_back(File::open_for_reading(path), 0, GetParam().direct);
    }
    return std::make_shared<RangeFiles>(std::move(files), 2);
  }

  // kRanges of every file, without places.
  std::vector<FileRange> ranges_of_all_files() const {
    std::vector<FileRange> ranges;
    for (std::size_t file = 0; file < paths_.size(); ++file) {
      for (const auto& [offset, nbytes] : kRanges) ranges.push_back({file, offset, nbytes});
    }
    return ranges;
  }

  // Memory for each range, with a byte before and behind it that must not change.
  static std::vector<std::string> make_places(std::vector<FileRange>& ranges) {
    std::vector<std::string> places;
    for (const FileRange& range : ranges) places.emplace_back(range.nbytes + 2, '#');
    for (std::size_t i = 0; i < ranges.size(); ++i) ranges[i].place = data_of(places[i]) + 1;
    return places;
  }

  void expect_filled(const std::vector<std::string>& places,
                     const std::vector<FileRange>& ranges) const {
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const std::string& content = contents_[ranges[i].file];
      EXPECT_EQ(places[i], "#" + content.substr(ranges[i].offset, ranges[i].nbytes) + "#") << i;
    }
  }

  Folder folder_;
  std::vector<std::string> contents_;
  std::vector<std::string> paths_;
};

INSTANTIATE_TEST_SUITE_P(Places, RangeReadFrom,
                         testing::Values(Source{"/tmp", false}, Source{"/tmp", true},
                                         Source{"/tmp", true, DirectReads::kNever},
                                         Source{"/dev/shm", false}));

TEST_P(RangeReadFrom, PutsEveryByteInItsPlaceAndTouchesNoOther) {
  for (const std::size_t n_threads : {std::size_t{0}, std::size_t{1}, std::size_t{5}}) {
    std::vector<FileRange> ranges = ranges_of_all_files();
    std::vector<std::string> places = make_places(ranges);
    RangeRead read(open(), ranges);
    read.run(n_threads, [] {});
    expect_filled(places, ranges);
  }
}

TEST_P(RangeReadFrom, ReadsThousandsOfSmallNeighbours) {
  std::vector<FileRange> ranges;
  std::uint64_t offset = 11;
  for (std::size_t i = 0; offset + 10'000 < kFileNbytes; ++i) {
    const std::uint64_t nbytes = i % 400 == 0 ? 9000 : 1 + 97 * i % 700;
    ranges.push_back({i % 2, offset, nbytes});
    offset += nbytes + (i % 50 == 0 ? 2000 : i % 7);
  }
  std::vector<std::string> places = make_places(ranges);
  RangeRead(open(), ranges).run(2, [] {});
  expect_filled(places, ranges);
}

// Targets are strings, which get their bytes at once.
class UnstagerDouble final : public Unstager {
 public:
  explicit UnstagerDouble(std::vector<std::string>& targets) : targets_(targets) {}

  std::unique_ptr<Lease> lease(std::size_t nbytes) override {
    EXPECT_LE(nbytes, RangeRead::kLeaseNbytes);
    return std::make_unique<Buffer>(nbytes);
  }
  void send(std::unique_ptr<Lease> lease, std::span<const Piece> pieces) override {
    const std::lock_guard lock(mutex_);
    EXPECT_FALSE(drained) << "drained before everything was sent";
    for (const Piece& piece : pieces) {
      std::memcpy(targets_[piece.target].data() + 1 + piece.offset, lease->data() + piece.at,
                  piece.nbytes);
    }
  }
  void drain() override { drained = true; }

  bool drained = false;

 private:
  struct Buffer final : Lease {
    explicit Buffer(std::size_t nbytes) : bytes(nbytes) {}
    std::byte* data() override { return bytes.data(); }
    std::vector<std::byte> bytes;
  };

  std::vector<std::string>& targets_;
  std::mutex mutex_;
};

TEST_P(RangeReadFrom, SendsWhatGoesOnAndPutsTheRestInItsPlace) {
  for (const std::size_t n_threads : {std::size_t{0}, std::size_t{3}}) {
    std::vector<FileRange> ranges = ranges_of_all_files();
    std::vector<std::string> places = make_places(ranges);
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      if (i % 3 != 0) ranges[i].target = i;
    }
    UnstagerDouble unstager(places);
    RangeRead(open(), ranges).run(n_threads, [] {}, &unstager);
    EXPECT_TRUE(unstager.drained);
    expect_filled(places, ranges);
  }
}

TEST_P(RangeReadFrom, ReadsEachByteOnceAndLittleMore) {
  std::string place(3 << 20, '\0');
  auto* const data = data_of(place);
  // Two near each other, and one far away.
  RangeRead read(open(),
                 {{0, 100, 10, data}, {0, 200, 10, data + 10}, {0, 4 << 20, 10, data + 20}});
  read.run(2, [] {});
  EXPECT_EQ(read.nbytes_read(), 110u + 10u);
}

TEST_P(RangeReadFrom, SkipsGapsThatAreLargerThanItIsTold) {
  std::string place(3 << 20, '\0');
  auto* const data = data_of(place);
  RangeRead read(open(), {{0, 100, 10, data}, {0, 150, 10, data + 10}, {0, 300, 10, data + 20}},
                 40);
  read.run(2, [] {});
  EXPECT_EQ(read.nbytes_read(), 60u + 10u);
  EXPECT_EQ(place.substr(10, 10), contents_[0].substr(150, 10));
  EXPECT_EQ(place.substr(20, 10), contents_[0].substr(300, 10));
}

TEST_P(RangeReadFrom, NothingIsNothing) {
  RangeRead read(open(), {});
  read.run(4, [] {});
  EXPECT_EQ(read.nbytes_read(), 0u);
}

TEST_P(RangeReadFrom, RefusesRangesThatOverlapOrAreOfNoFile) {
  std::string place(100, '\0');
  auto* const data = data_of(place);
  EXPECT_THROW(RangeRead(open(), {{0, 0, 10, data}, {0, 9, 10, data + 10}}), std::invalid_argument);
  EXPECT_THROW(RangeRead(open(), {{2, 0, 10, data}}), std::invalid_argument);
}

TEST_P(RangeReadFrom, AFileThatIsTooShortIsAnError) {
  std::string place(100, '\0');
  auto* const data = data_of(place);
  EXPECT_THROW(RangeRead(open(), {{0, kFileNbytes - 9, 10, data}}), IoError);
  EXPECT_THROW(RangeRead(open(), {{0, kFileNbytes + 9, 10, data}}), IoError);
  RangeRead read(open(), {{1, kFileNbytes - 10, 10, data}});
  ASSERT_EQ(::truncate(paths_[1].c_str(), 1000), 0);
  EXPECT_THROW(read.run(2, [] {}), IoError);
}

TEST_P(RangeReadFrom, WhatThePollThrowsEndsIt) {
  std::string place(kFileNbytes, '\0');
  RangeRead read(open(), {{0, 0, kFileNbytes, data_of(place)}});
  EXPECT_THROW(read.run(0, [] { throw std::runtime_error("enough"); }), std::runtime_error);
}

}  // namespace

}  // namespace ptsave
