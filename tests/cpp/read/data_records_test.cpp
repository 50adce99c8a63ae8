#include "core/read/data_records.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/archive_file.h"
#include "core/read/reader.h"

namespace ptsave {
namespace {

using namespace archive_fixture;  // NOLINT(google-build-using-namespace)

// Keys that are no numbers, and names that only look like storages.
const std::vector<Record> kRecords{{"data.pkl", "pickle"}, {"data/1", "one"},  {"data/0", "zero"},
                                   {"database", "no"},     {"data/a/b", "ab"}, {"version", "3\n"},
                                   {"data/2", ""}};

class Data : public testing::Test {
 protected:
  const std::string bytes_ = archive(kRecords);
  const ArchiveReader reader_{memory_source(bytes_)};
  DataRecords records_{reader_.index()};
};

TEST_F(Data, AreThoseInTheFolderOfStorages) {
  EXPECT_EQ(records_.storages(), (std::vector<std::size_t>{1, 2, 4, 6}));
  EXPECT_EQ(records_.others(), (std::vector<std::size_t>{0, 3, 5}));
}

TEST_F(Data, AreFoundByKeyInAnyOrder) {
  for (const std::size_t n_rounds : {1u, 2u}) {
    EXPECT_EQ(records_.find("0"), 2u) << n_rounds;
    EXPECT_EQ(records_.find("1"), 1u);
    EXPECT_EQ(records_.find("0"), 2u) << "the next record";
    EXPECT_EQ(records_.find("a/b"), 4u) << "not the next record";
    EXPECT_EQ(records_.find("2"), 6u);
    EXPECT_EQ(records_.find("2"), 6u) << "behind the last record";
    EXPECT_EQ(records_.find("3"), ArchiveIndex::kNotFound);
    EXPECT_EQ(records_.find(""), ArchiveIndex::kNotFound);
    EXPECT_EQ(records_.find("base"), ArchiveIndex::kNotFound);
  }
}

TEST(DataCrcs, AreThereForEveryStorageOrForNone) {
  const auto have_crcs = [](const std::vector<Record>& records, bool with_crcs) {
    const std::string bytes = archive(records, 64, "archive", with_crcs);
    const ArchiveReader reader(memory_source(bytes));
    return DataRecords(reader.index()).have_crcs();
  };
  EXPECT_TRUE(have_crcs(kRecords, true));
  EXPECT_FALSE(have_crcs(kRecords, false));
  EXPECT_TRUE(have_crcs({{"data.pkl", "pickle"}}, false)) << "nothing to verify";
  EXPECT_TRUE(have_crcs({{"data.pkl", "pickle"}, {"data/0", ""}}, false)) << "nothing to verify";
  EXPECT_TRUE(have_crcs({{"data.pkl", "pickle"}, {"data/0", "x"}, {"data/1", ""}}, true));
}

TEST_F(Data, KnowsWhetherAllRecordsAreStored) { EXPECT_TRUE(reader_.index().all_stored()); }

TEST_F(Data, WholePayloadsHaveTheSizesOfTheirRecords) {
  std::string zero(4, '?');
  std::string one(3, '?');
  const std::vector<std::size_t> records{2, 6, 1};
  const std::vector<std::span<std::byte>> memory{
      archive_fixture::bytes_of(zero), {}, archive_fixture::bytes_of(one)};
  EXPECT_TRUE(whole_payloads(reader_.index(), records, {}).empty());
  const std::vector<Destination> places = whole_payloads(reader_.index(), records, memory);
  ASSERT_EQ(places.size(), 2u) << "none for an empty one";
  EXPECT_TRUE(reader_.read_records(records, places, 0, true, [] {}).empty());
  EXPECT_EQ(zero + one, "zeroone");
  const std::vector<std::size_t> fewer{2, 6};
  EXPECT_THROW(whole_payloads(reader_.index(), fewer, memory), std::invalid_argument);
  const std::vector<std::size_t> others{1, 6, 2};
  EXPECT_THROW(whole_payloads(reader_.index(), others, memory), std::invalid_argument);
}

}  // namespace
}  // namespace ptsave
