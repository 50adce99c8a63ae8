// Archives that grow: every batch is a whole number of records, and errors leave what was there.
#include "core/write/appended_archive.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/archives.h"
#include "core/read/reader.h"

namespace ptsave {
namespace {

using namespace common;

std::vector<Record> batch(std::size_t number, std::size_t n_records, std::size_t nbytes) {
  std::vector<Record> records;
  for (std::size_t i = 0; i < n_records; ++i) {
    const std::string name = "data/" + std::to_string(100 * number + i);
    records.push_back({name, noise(i % 3 == 2 ? 0 : nbytes + 37 * i, 100 * number + i)});
  }
  return records;
}

void append(AppendedArchive& archive, const std::vector<Record>& records, bool direct,
            std::size_t n_threads) {
  const Payloads payloads = [&](std::size_t i) { return data_of(records[i].data); };
  const WriteOptions options{.n_threads = n_threads, .chunk_nbytes = 8192};
  archive.append(specs_of(records), payloads, direct, options, kNoPoll);
}

// The records of a file, as the reader has them.
std::vector<Record> read_back(const std::string& path) {
  ArchiveReader reader(ByteSource(File::open_for_reading(path), 0));
  std::vector<Record> records;
  const std::string bytes = read_file(path);
  for (const IndexedRecord& record : reader.index().records()) {
    const auto header = std::as_bytes(std::span(bytes)).subspan(record.header_offset);
    const std::uint64_t at =
        payload_offset(header, record, reader.index().root().size(), record.limit);
    records.push_back({record.name, bytes.substr(at, record.nbytes)});
  }
  return records;
}

class Appended : public testing::TestWithParam<bool> {
 protected:
  const Folder folder_;
  const std::string path_ = folder_ / "run.pt";
};

TEST_P(Appended, BatchesBecomeOneArchive) {
  std::vector<Record> expected;
  {
    AppendedArchive archive({path_, path_}, "run", 64);
    for (std::size_t i = 0; i < 12; ++i) {
      const std::vector<Record> records = batch(i, 1 + i % 5, 100 + 7000 * (i % 4));
      append(archive, records, GetParam(), i % 3);
      expected.insert(expected.end(), records.begin(), records.end());
      EXPECT_EQ(archive.read(archive.payload_offset(0), records[0].data.size()), records[0].data);
    }
    archive.sync();
    EXPECT_EQ(folder_.names().size(), 1u);
    archive.close("pickle", true, true);
  }
  EXPECT_EQ(folder_.names(), std::set<std::string>{"run.pt"});
  const std::vector<Record> found = read_back(path_);
  ASSERT_EQ(found.size(), expected.size() + 4);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found[i].name, expected[i].name);
    EXPECT_TRUE(found[i].data == expected[i].data) << expected[i].name;
  }
  EXPECT_EQ(found[expected.size()].name, "data.pkl");
  EXPECT_EQ(found[expected.size()].data, "pickle");
  EXPECT_EQ(found.back().data.size(), 40u);
}

TEST_P(Appended, BuffersServeBatchesOfAnySize) {
  AppendedArchive archive({path_, path_}, "run", 64);
  std::vector<Record> expected;
  for (const std::size_t nbytes : {1000u, 300'000u, 10u, 900'000u}) {
    const std::vector<Record> records = batch(expected.size(), 3, nbytes);
    append(archive, records, GetParam(), expected.size() % 4);
    expected.insert(expected.end(), records.begin(), records.end());
  }
  archive.close("pickle", true, false);
  const std::vector<Record> found = read_back(path_);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(found[i].data == expected[i].data);
}

TEST_P(Appended, WithoutAnyBatch) {
  AppendedArchive archive({path_, path_}, "run", 64);
  archive.close("pickle", true, false);
  EXPECT_EQ(read_back(path_).size(), 4u);
  EXPECT_THROW(append(archive, batch(0, 1, 10), GetParam(), 0), std::invalid_argument);
}

TEST_P(Appended, DiscardedOrKept) {
  {
    AppendedArchive archive({path_, path_}, "run", 64);
    append(archive, batch(0, 3, 10'000), GetParam(), 2);
  }
  EXPECT_TRUE(folder_.names().empty());
  {
    AppendedArchive archive({path_, path_}, "run", 64);
    append(archive, batch(0, 3, 10'000), GetParam(), 2);
    archive.keep();
  }
  EXPECT_EQ(folder_.names().size(), 1u);
}

TEST_P(Appended, AChildDoesNotTouchTheFile) {
  auto archive =
      std::make_unique<AppendedArchive>(AppendedArchive::Target{path_, path_}, "run", 64);
  append(*archive, batch(0, 1, 10), GetParam(), 0);
  EXPECT_EQ(in_child([&] { archive.reset(); }), 0);
  EXPECT_EQ(folder_.names().size(), 1u);
  archive->close("pickle", true, false);
  EXPECT_EQ(read_back(path_).size(), 5u);
}

INSTANTIATE_TEST_SUITE_P(Ways, Appended, testing::Bool(),
                         [](const auto& each) { return each.param ? "Direct" : "Buffered"; });

TEST(WrittenRecordsTest, ClosingBytesCompleteAFile) {
  const Folder folder;
  const std::string path = folder / "run.pt";
  WrittenRecords written("run", 64);
  const RecordSpec spec{"data/0", 5};
  const ArchiveLayout layout = written.place({&spec, 1});
  const RecordLayout& record = layout.record(0);
  std::string bytes(record.end(), '\0');
  layout.local_header(0, data_of(bytes));
  bytes.replace(record.payload_offset, 5, "hello");
  layout.data_descriptor(0, 0x3610a686, data_of(bytes) + record.payload_end());
  written.add("data/0", 0, 5, 0x3610a686, record.end());
  EXPECT_EQ(written.end(), record.end());
  write_file(path, bytes + written.closing_bytes("pickle", true));
  const std::vector<Record> found = read_back(path);
  ASSERT_EQ(found.size(), 5u);
  EXPECT_EQ(found[0].data, "hello");
}

}  // namespace
}  // namespace ptsave
