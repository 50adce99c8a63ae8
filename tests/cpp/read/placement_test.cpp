#include "core/read/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/archives.h"
#include "core/base/error.h"
#include "core/memory/pages.h"
#include "core/read/reader.h"

namespace ptsave {
namespace {

using namespace common;

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

constexpr char kUntouched = '\x5A';

// Memory for parts of records, one behind the other, with bytes between that nobody may touch.
class Targets {
 public:
  explicit Targets(std::uint32_t seed) : random_(seed) {}

  void add(std::size_t record, std::uint64_t offset, std::uint64_t nbytes) {
    begins_.push_back(memory_.size() + random_() % 70);
    memory_.resize(begins_.back() + nbytes + random_() % 70, kUntouched);
    destinations_.push_back({record, offset, nbytes, nullptr});
  }

  // All of it, in parts, with gaps that nobody wants, in a shuffled order.
  void add_parts(std::size_t record, std::size_t nbytes, std::size_t max_part_nbytes) {
    for (std::size_t at = 0; at < nbytes;) {
      const std::size_t part = std::min(nbytes - at, 1 + random_() % max_part_nbytes);
      if (random_() % 4 != 0) add(record, at, part);
      at += part;
    }
  }

  std::vector<Destination> destinations() {
    std::vector<Destination> placed = destinations_;
    for (std::size_t i = 0; i < placed.size(); ++i) {
      placed[i].place = data_of(memory_) + begins_[i];
    }
    std::ranges::shuffle(placed, random_);
    return placed;
  }

  void expect_filled(const std::vector<Record>& records) const {
    std::string expected(memory_.size(), kUntouched);
    for (std::size_t i = 0; i < destinations_.size(); ++i) {
      const Destination& part = destinations_[i];
      expected.replace(begins_[i], part.nbytes, records[part.record].data, part.offset,
                       part.nbytes);
    }
    EXPECT_TRUE(memory_ == expected);
  }

  void clear() { std::ranges::fill(memory_, kUntouched); }

 private:
  std::mt19937 random_;
  std::string memory_;
  std::vector<std::size_t> begins_;
  std::vector<Destination> destinations_;
};

void expect_fills(ByteSource source, const std::vector<Record>& records, Targets& targets,
                  std::size_t n_threads) {
  targets.clear();
  ArchiveReader reader(std::move(source));
  const std::vector<Destination> destinations = targets.destinations();
  EXPECT_TRUE(reader.fill(destinations, n_threads, reader.index().has_crcs(), kNoPoll).empty());
  targets.expect_filled(records);
}

const std::vector<std::size_t> kSizes{1,    0,        100,    70000, 5 * kMiB + 3, 17,
                                      4096, 2 * kMiB, 300000, 33000, 64,           3 * kMiB - 1};

TEST(Scatter, WholeRecords) {
  const std::vector<Record> records = records_of(kSizes);
  Targets targets(1);
  for (std::size_t i = 0; i < kSizes.size(); ++i) targets.add(i, 0, kSizes[i]);
  for (const std::uint64_t alignment : {64u, 1u}) {
    const std::string bytes = archive(records, alignment);
    const ArchiveFile file(bytes, alignment == 1 ? 777 : 0);
    for (const std::size_t n_threads : {0u, 4u}) {
      expect_fills(memory_source(bytes), records, targets, n_threads);
      expect_fills(file.source(), records, targets, n_threads);
      for (const DirectReads direct : {DirectReads::kNever, DirectReads::kAlways}) {
        file.drop_from_page_cache();
        expect_fills(file.source(direct), records, targets, n_threads);
      }
    }
  }
}

TEST(Scatter, PartsOfRecords) {
  const std::vector<Record> records = records_of(kSizes);
  const std::string bytes = archive(records);
  const ArchiveFile file(bytes);
  for (const std::size_t part : {std::size_t{100}, std::size_t{50000}, 3 * kMiB}) {
    for (std::uint32_t seed = 0; seed < 4; ++seed) {
      Targets targets(seed);
      for (std::size_t i = 0; i < kSizes.size(); ++i) {
        if (i % 3 != seed % 3) targets.add_parts(i, std::min(kSizes[i], 400 * part), part);
      }
      expect_fills(memory_source(bytes), records, targets, seed);
      if (seed % 2 == 0) file.drop_from_page_cache();
      expect_fills(file.source(), records, targets, seed);
    }
  }
}

TEST(Scatter, WithoutChecksums) {
  const std::vector<Record> records = records_of(kSizes);
  const std::string bytes = archive(records, 64, "archive", false);
  Targets targets(3);
  for (std::size_t i = 0; i < kSizes.size(); ++i) targets.add_parts(i, kSizes[i], kMiB);
  expect_fills(memory_source(bytes), records, targets, 2);
  expect_fills(ArchiveFile(bytes).source(), records, targets, 2);
}

TEST(Scatter, ArchivesOfOtherWriters) {
  const std::vector<Record> records = records_of({100, 70000, 3 * kMiB, 0, 200});
  for (const std::size_t gap : {1u, 5000u, 200000u}) {
    const std::string bytes = foreign_archive(records, gap, [](std::size_t) { return 0; });
    Targets targets(4);
    for (std::size_t i = 0; i < records.size(); ++i) targets.add(i, 0, records[i].data.size());
    expect_fills(memory_source(bytes), records, targets, 2);
    expect_fills(ArchiveFile(bytes).source(), records, targets, 2);
  }
}

TEST(Scatter, DamageIsReportedForWhatNobodyWantsToo) {
  const std::vector<Record> records = records_of({100, 5 * kMiB, 70000});
  std::string bytes = archive(records);
  bytes[ArchiveReader(memory_source(bytes)).payload_offset(1) + 3 * kMiB] ^= 1;
  Targets targets(5);
  targets.add(0, 0, 100);
  targets.add(1, 0, kMiB);
  ArchiveReader reader(memory_source(bytes));
  const std::vector<DamagedRecord> damaged = reader.fill(targets.destinations(), 2, true, kNoPoll);
  ASSERT_EQ(damaged.size(), 1u);
  EXPECT_EQ(damaged[0].name, "data/1");
  EXPECT_EQ(reader.begun(), (std::vector<std::size_t>{0, 1}));
  targets.expect_filled(records);  // the damaged byte is not among those
  EXPECT_TRUE(reader.fill(targets.destinations(), 2, false, kNoPoll).empty());
}

TEST(Scatter, AWrongHeaderStopsBeforeItsPayload) {
  const std::vector<Record> records = records_of({100, 70000, 200});
  std::string bytes = archive(records);
  bytes[ArchiveReader(memory_source(bytes)).index().records()[1].header_offset] ^= 1;
  Targets targets(6);
  for (std::size_t i = 0; i < records.size(); ++i) targets.add(i, 0, records[i].data.size());
  ArchiveReader reader(memory_source(bytes));
  EXPECT_THROW(reader.fill(targets.destinations(), 0, true, kNoPoll), FormatError);
}

TEST(Scatter, AnInterruptLeavesNothingInFlight) {
  const std::vector<Record> records = records_of({9 * kMiB, 100, 9 * kMiB});
  const ArchiveFile file(archive(records));
  Targets targets(7);
  for (std::size_t i = 0; i < records.size(); ++i) targets.add(i, 0, records[i].data.size());
  struct Interrupt {};
  for (const std::size_t n_threads : {0u, 3u}) {
    ArchiveReader reader(file.source());
    const auto interrupt = [] { throw Interrupt{}; };
    try {
      reader.fill(targets.destinations(), n_threads, true, interrupt);
    } catch (const Interrupt&) {
      EXPECT_LE(reader.begun().size(), records.size());
    }
    targets.clear();  // under a sanitizer: nobody writes there any more
  }
}

TEST(Scatter, DestinationsAreChecked) {
  const std::string bytes = archive(records_of({100, 200}));
  ArchiveReader reader(memory_source(bytes));
  std::string memory(300, kUntouched);
  auto* const place = data_of(memory);
  const auto fill = [&](const std::vector<Destination>& destinations) {
    reader.fill(destinations, 0, true, kNoPoll);
  };
  EXPECT_THROW(fill({{0, 0, 101, place}}), std::invalid_argument);
  EXPECT_THROW(fill({{0, 101, 0, place}}), std::invalid_argument);
  EXPECT_THROW(fill({{0, ~std::uint64_t{0}, 2, place}}), std::invalid_argument);
  EXPECT_THROW(fill({{0, 0, 50, place}, {0, 49, 10, place}}), std::invalid_argument);
  EXPECT_THROW(fill({{1, 10, 20, place}, {1, 10, 20, place + 50}}), std::invalid_argument);
  fill({{0, 100, 0, place}, {1, 0, 100, place}, {1, 100, 100, place + 100}});
  fill({});
  EXPECT_EQ(memory.substr(200), std::string(100, kUntouched));
}

TEST(Scatter, ReservedPayloadsAreZeroUntilFilled) {
  const std::vector<Record> records = records_of({100, 3 * kMiB, 0});
  const std::string bytes = archive(records);
  ArchiveReader reader(memory_source(bytes));
  reader.reserve({0, 1, 2});
  const LoadedPayload payload = reader.payload(1);
  const auto text = [&] {
    return std::string(reinterpret_cast<const char*>(payload.data), payload.nbytes);
  };
  EXPECT_EQ(text(), std::string(3 * kMiB, '\0'));
  reader.fill({{1, 0, payload.nbytes, payload.data}}, 2, true, kNoPoll);
  EXPECT_TRUE(text() == records[1].data);
  reader.discard(1);
  EXPECT_TRUE(text().substr(8192, kMiB) == std::string(kMiB, '\0'));
  EXPECT_EQ(reader.payload(2).data, nullptr);
}

}  // namespace

}  // namespace ptsave
