#include "core/read/reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/archives.h"
#include "core/base/error.h"
#include "core/format/zip.h"
#include "core/memory/buffer.h"

namespace ptsave {
namespace {

using namespace common;

using Indices = std::vector<std::size_t>;

std::string read(const ArchiveReader& reader, std::size_t i, bool verify) {
  std::string payload(reader.index().records()[i].nbytes, '\0');
  reader.read(i, reader.stored_payload_offset(i), payload.data(), verify);
  return payload;
}

std::string text_of(const LoadedPayload& payload) {
  return common::text_of(payload.data, payload.nbytes);
}

Indices all_of(const ArchiveReader& reader) {
  Indices indices(reader.index().records().size());
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = i;
  return indices;
}

void expect_payloads(ArchiveReader& reader, const std::vector<Record>& records,
                     const Indices& wanted) {
  for (const std::size_t i : wanted) {
    const LoadedPayload payload = reader.payload(i);
    ASSERT_TRUE(text_of(payload) == records[i].data) << "record " << i;
    if (payload.nbytes == 0) continue;
    // Aligned as in the file, so that direct reads need no copy.
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(payload.data) % page_nbytes(),
              reader.payload_offset(i) % page_nbytes());
  }
}

void expect_loads(ByteSource source, const std::vector<Record>& records, Indices wanted,
                  std::size_t n_threads, bool exact_offsets = false) {
  ArchiveReader reader(std::move(source));
  if (wanted.empty()) wanted = all_of(reader);
  reader.start(wanted, n_threads, reader.index().has_crcs(), exact_offsets);
  EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
  expect_payloads(reader, records, wanted);
}

// -------------------------------------------------------------------------------------- round trip

struct Layout {
  const char* name;
  std::vector<std::size_t> sizes;
  std::uint64_t alignment;
};

std::vector<std::size_t> tiny_sizes() {
  std::vector<std::size_t> sizes;
  sizes.reserve(4000);
  for (std::size_t i = 0; i < 4000; ++i) sizes.push_back(i % 47);
  return sizes;
}

std::vector<std::size_t> mixed_sizes() {
  std::vector<std::size_t> sizes;
  sizes.reserve(300);
  for (std::size_t i = 0; i < 300; ++i) {
    sizes.push_back(i % 50 == 0 ? 300000 + i : i % 7 == 0 ? 0 : 97 * i);
  }
  return sizes;
}

class RoundTrip : public testing::TestWithParam<Layout> {
 protected:
  const std::vector<Record> records_ = records_of(GetParam().sizes);
  const std::string bytes_ = archive(records_, GetParam().alignment);
};

INSTANTIATE_TEST_SUITE_P(
    Layouts, RoundTrip,
    testing::Values(Layout{"one", {1}, 64}, Layout{"empty", {0, 0}, 64},
                    Layout{"tiny", tiny_sizes(), 64}, Layout{"tiny_unaligned", tiny_sizes(), 1},
                    Layout{"mixed", mixed_sizes(), 64},
                    Layout{"large", {7, 9 * kMiB + 5, 0, 3, 2 * kMiB, 4 * kMiB - 100, 1}, 64},
                    Layout{"pages", {1, 4096, 4095, 4097, 3 * kMiB, 0, 2 * kMiB}, 4096}),
    [](const auto& layout) { return layout.param.name; });

TEST_P(RoundTrip, FromMemory) {
  for (const std::size_t n_threads : {0u, 1u, 4u}) {
    for (const bool exact : {false, true}) {
      expect_loads(memory_source(bytes_), records_, {}, n_threads, exact);
    }
  }
}

TEST_P(RoundTrip, FromAFile) {
  for (const std::uint64_t offset : {0u, 4096u, 777u}) {
    const ArchiveFile file(bytes_, offset);
    for (const std::size_t n_threads : {0u, 1u, 4u}) {
      expect_loads(file.source(), records_, {}, n_threads);
      for (const DirectReads direct : {DirectReads::kNever, DirectReads::kAlways}) {
        file.drop_from_page_cache();
        expect_loads(file.source(direct), records_, {}, n_threads);
      }
    }
  }
}

TEST_P(RoundTrip, FromAPartlyCachedFile) {
  const ArchiveFile file(bytes_);
  file.drop_from_page_cache();
  const File reading = File::open_for_reading(file.path());
  ::posix_fadvise(reading.fd(), 0, 0, POSIX_FADV_RANDOM);
  std::string page(4096, '\0');
  for (std::size_t at = 123456; at + 4096 < bytes_.size(); at += 777777) {
    reading.read_at(at, page.data(), page.size());
  }
  expect_loads(file.source(), records_, {}, 3);
}

TEST_P(RoundTrip, FromTmpfs) {
  const ArchiveFile file(bytes_, 0, "/dev/shm");
  expect_loads(file.source(), records_, {}, 3);
}

TEST_P(RoundTrip, WithoutChecksums) {
  const std::string bytes = archive(records_, GetParam().alignment, "archive", false);
  expect_loads(memory_source(bytes), records_, {}, 2);
}

TEST_P(RoundTrip, OneByOne) {
  const ArchiveReader reader(memory_source(bytes_));
  for (std::size_t i = 0; i < records_.size(); ++i) {
    ASSERT_TRUE(read(reader, i, true) == records_[i].data) << i;
  }
}

TEST_P(RoundTrip, WaitingForEachRecord) {
  const ArchiveFile file(bytes_);
  for (const std::size_t n_threads : {0u, 3u}) {
    ArchiveReader reader(file.source());
    reader.start(all_of(reader), n_threads, true, false);
    for (std::size_t i = records_.size(); i-- > 0;) {
      reader.wait(i, kNoPoll);
      ASSERT_TRUE(text_of(reader.payload(i)) == records_[i].data) << i;
    }
    EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
    EXPECT_GE(reader.nbytes_read(), reader.nbytes_to_read());
  }
}

TEST(Reader, EverySizeAroundAPage) {
  std::vector<std::size_t> sizes{0};
  for (std::size_t nbytes = 3900; nbytes < 4300; ++nbytes) sizes.push_back(nbytes);
  const std::vector<Record> records = records_of(sizes);
  const ArchiveFile file(archive(records));
  file.drop_from_page_cache();
  expect_loads(file.source(), records, {}, 2);
}

TEST(Reader, RecordsThatEndAroundAChunkBoundary) {
  const std::size_t boundary = kHugePageNbytes;
  for (std::size_t delta = 0; delta < 256; delta += 5) {
    const std::vector<Record> records =
        records_of({boundary - 256 + delta, 1, boundary - 80, 0, 20, boundary});
    const std::string bytes = archive(records, 1);
    expect_loads(memory_source(bytes), records, {}, delta % 2);
  }
}

// ---------------------------------------------------------------------------------- what is wanted

TEST(Reader, ReadsOnlyWhatIsWanted) {
  const std::vector<Record> records =
      records_of({10, 30000, 20, 3 * kMiB, 5 * kMiB, 40, 100000, 50, 0, 60});
  const ArchiveFile file(archive(records));
  for (const Indices& wanted : {Indices{0, 2}, {0, 9}, {3}, {9, 5, 0, 7}, {8}, {1, 4, 6}}) {
    for (const std::size_t n_threads : {0u, 3u}) {
      file.drop_from_page_cache();
      expect_loads(file.source(), records, wanted, n_threads);
      expect_loads(file.source(), records, wanted, n_threads, true);
    }
  }
}

TEST(Reader, GapsOfEverySize) {
  for (const std::size_t gap : {0u, 1u, 60000u, 65536u - 4096u, 65536u, 70000u, 80000u, 3000000u}) {
    const std::vector<Record> records = records_of({5000, gap, 6000, gap, 2 * kMiB});
    expect_loads(memory_source(archive(records)), records, {0, 2, 4}, 2);
  }
}

TEST(Reader, StartsWithNothingWanted) {
  const std::string bytes = archive(records_of({5, 0}));
  ArchiveReader reader(memory_source(bytes));
  reader.start({1}, 4, true, false);
  EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
  EXPECT_EQ(reader.nbytes_to_read(), 0u);
  EXPECT_EQ(reader.payload(1).data, nullptr);
}

TEST(Reader, CountsWhatItReads) {
  const std::vector<Record> records = records_of({1000, 5 * kMiB, 3 * kMiB});
  const std::string bytes = archive(records);
  ArchiveReader reader(memory_source(bytes));
  reader.start({0, 1}, 2, true, false);
  EXPECT_EQ(reader.nbytes_to_read(), 1000 + 5 * kMiB);
  std::uint64_t last = 0;
  reader.wait_all([&] {
    EXPECT_GE(reader.nbytes_read(), last);
    last = reader.nbytes_read();
  });
  EXPECT_GE(reader.nbytes_read(), reader.nbytes_to_read());
}

// ----------------------------------------------------------------------------- beside a transfer

TEST(Reader, ReadsRecordsBesideATransfer) {
  const std::vector<Record> records = records_of({1000, 3 * kMiB, 0, 70000, 5 * kMiB});
  const ArchiveFile file(archive(records));
  for (const std::size_t n_threads : {0u, 3u}) {
    ArchiveReader reader(file.source());
    reader.start(all_of(reader), n_threads, true, false);
    std::string large(3 * kMiB, '\0');
    std::string small(70000, '\0');
    const std::vector<Destination> destinations = {{3, 0, small.size(), data_of(small)},
                                                   {1, 0, large.size(), data_of(large)}};
    EXPECT_TRUE(reader.read_records({3, 1, 3}, destinations, n_threads, true, kNoPoll).empty());
    EXPECT_TRUE(small == records[3].data);
    EXPECT_TRUE(large == records[1].data);
    EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
    expect_payloads(reader, records, all_of(reader));
  }
}

TEST(Reader, ChecksRecordsWithoutKeepingThem) {
  const std::vector<Record> records = records_of({1000, 3 * kMiB, 0, 70000});
  std::string bytes = archive(records);
  const ArchiveReader undamaged(memory_source(bytes));
  EXPECT_TRUE(undamaged.read_records(all_of(undamaged), {}, 2, true, kNoPoll).empty());
  EXPECT_TRUE(undamaged.read_records({}, {}, 2, true, kNoPoll).empty());
  bytes[undamaged.payload_offset(1) + 2 * kMiB] ^= 1;
  const ArchiveFile file(bytes);
  const ArchiveReader reader(file.source());
  const std::vector<DamagedRecord> damaged =
      reader.read_records(all_of(reader), {}, 2, true, kNoPoll);
  ASSERT_EQ(damaged.size(), 1u);
  EXPECT_EQ(damaged[0].name, records[1].name);
  EXPECT_TRUE(reader.read_records(all_of(reader), {}, 2, false, kNoPoll).empty());
}

TEST(Reader, ReadsRecordsOfForeignArchivesExactly) {
  const std::vector<Record> records = records_of({100, 70000, 3 * kMiB});
  const std::string bytes = foreign_archive(records, 5000, [](std::size_t) { return 0; });
  const ArchiveReader reader(memory_source(bytes));
  EXPECT_TRUE(reader.read_records(all_of(reader), {}, 2, true, kNoPoll).empty());
}

TEST(Reader, ReadsRanges) {
  const std::string bytes = archive(records_of({1000, 5 * kMiB}));
  const ArchiveFile file(bytes);
  const ArchiveReader reader(file.source());
  for (const std::size_t n : {std::size_t{0}, std::size_t{7}, 2 * kMiB, 5 * kMiB + 1}) {
    std::string found(n, '\0');
    reader.read_range(1001, data_of(found), n, 3, kNoPoll);
    EXPECT_TRUE(found == bytes.substr(1001, n)) << n;
  }
  std::string beyond(10, '\0');
  EXPECT_THROW(reader.read_range(bytes.size() - 5, data_of(beyond), 10, 3, kNoPoll), IoError);
}

TEST(Reader, ReadsAFileThatIsClosedInBetween) {
  const std::size_t descriptors = n_descriptors();
  const std::vector<Record> records = records_of({1000, 5 * kMiB});
  const ArchiveFile file(archive(records), 4096);
  ArchiveReader reader(file.source());
  reader.start(all_of(reader), 2, true, false);
  for (int i = 0; i < 3; ++i) {
    const std::string name = reader.source().name();
    reader.exchange(ByteSource::closed(reader.source().nbytes(), name));
    EXPECT_EQ(n_descriptors(), descriptors);
    try {
      read(reader, 1, true);
      FAIL();
    } catch (const IoError& error) {
      EXPECT_EQ(error.errnum(), EBADF);
      EXPECT_EQ(error.path(), file.path());
    }
    EXPECT_FALSE(reader.source().read_direct(0, nullptr, 0));
    EXPECT_THROW(reader.source().may_be_cached(0, 1), IoError);
    EXPECT_THROW(reader.source().read_ahead(0, 1), IoError);
    reader.exchange(file.source());
    EXPECT_TRUE(read(reader, 1, true) == records[1].data);
  }
  EXPECT_THROW(reader.exchange(memory_source("other bytes")), std::invalid_argument);
  EXPECT_TRUE(read(reader, 0, true) == records[0].data);
}

// ------------------------------------------------------------------------------------------ damage

TEST(ReaderDamage, IsReportedForTheRightRecords) {
  const std::vector<Record> records =
      records_of({1, 100, 70000, 0, 3, 5 * kMiB + 1, 2 * kMiB, 64, 4096});
  const std::string whole = archive(records);
  const ArchiveReader undamaged(memory_source(whole));
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::size_t nbytes = records[i].data.size();
    if (nbytes == 0) continue;
    for (const std::size_t at : {std::size_t{0}, nbytes / 2, nbytes - 1}) {
      std::string bytes = whole;
      const std::uint64_t offset = undamaged.payload_offset(i);
      bytes[offset + at] = static_cast<char>(bytes[offset + at] ^ 0x10);
      ArchiveReader reader(memory_source(bytes));
      reader.start(all_of(reader), at % 3, true, false);
      const std::vector<DamagedRecord> damaged = reader.wait_all(kNoPoll);
      ASSERT_EQ(damaged.size(), 1u) << i << " " << at;
      EXPECT_EQ(damaged[0].name, records[i].name);
      EXPECT_EQ(damaged[0].payload_offset, offset);
      EXPECT_EQ(damaged[0].expected_crc, crc_of(records[i].data));
      EXPECT_EQ(damaged[0].actual_crc, crc_of(text_of(reader.payload(i))));
      EXPECT_THROW(read(reader, i, true), FormatError);
      EXPECT_NO_THROW(read(reader, i, false));
    }
  }
}

TEST(ReaderDamage, IsReportedInFileOrder) {
  const std::vector<Record> records = records_of({100, 5 * kMiB, 70000, 3, 100});
  std::string bytes = archive(records);
  const ArchiveReader undamaged(memory_source(bytes));
  for (const std::size_t i : {3u, 0u, 1u}) bytes[undamaged.payload_offset(i)] ^= 1;
  const ArchiveFile file(bytes);
  file.drop_from_page_cache();
  ArchiveReader reader(file.source());
  reader.start({4, 3, 2, 1, 0}, 4, true, false);
  std::vector<std::string> names;
  for (const DamagedRecord& record : reader.wait_all(kNoPoll)) names.push_back(record.name);
  EXPECT_EQ(names, (std::vector<std::string>{"data/0", "data/1", "data/3"}));
}

TEST(ReaderDamage, IsNotLookedForUnlessAsked) {
  std::string bytes = archive(records_of({100, 200}));
  bytes[ArchiveReader(memory_source(bytes)).payload_offset(0)] ^= 1;
  ArchiveReader reader(memory_source(bytes));
  reader.start({0, 1}, 0, false, false);
  EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
}

TEST(ReaderDamage, OfALocalHeaderIsFoundByReadingExactly) {
  const std::vector<Record> records = records_of({100, 70000, 3 * kMiB, 200});
  const std::string whole = archive(records);
  const ArchiveReader undamaged(memory_source(whole));
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::uint64_t header = undamaged.index().records()[i].header_offset;
    // Signature, flags, method, length of the name, length of the extra fields, name.
    for (const std::size_t field : {0u, 6u, 8u, 26u, 28u, 40u}) {
      std::string bytes = whole;
      bytes[header + field] ^= 8;
      ArchiveReader reader(memory_source(bytes));
      reader.start(all_of(reader), 2, true, false);
      EXPECT_THROW(reader.wait_all(kNoPoll), LayoutMismatch) << i << " " << field;
      ArchiveReader again(memory_source(bytes));
      EXPECT_THROW(again.start(all_of(again), 2, true, true), FormatError) << i << " " << field;
      EXPECT_THROW(read(again, i, true), FormatError);
    }
  }
}

TEST(ReaderDamage, OfALocalHeaderComesOutOfWait) {
  std::string bytes = archive(records_of({100, 70000}));
  bytes[ArchiveReader(memory_source(bytes)).index().records()[1].header_offset] ^= 1;
  ArchiveReader reader(memory_source(bytes));
  reader.start({0, 1}, 0, true, false);
  EXPECT_THROW(reader.wait(1, kNoPoll), LayoutMismatch);
}

TEST(ReaderForeign, ArchivesWithGapsAreReadExactly) {
  for (const std::size_t gap : {1u, 10u, 5000u, 200000u}) {
    const std::vector<Record> records = records_of({100, 70000, 3 * kMiB, 0, 200});
    const std::string bytes = foreign_archive(records, gap, [](std::size_t) { return 0; });
    ArchiveReader reader(memory_source(bytes));
    reader.start(all_of(reader), 2, true, false);
    EXPECT_THROW(reader.wait_all(kNoPoll), LayoutMismatch);
    expect_loads(memory_source(bytes), records, {}, 2, true);
    expect_loads(ArchiveFile(bytes).source(), records, {}, 2, true);
  }
}

TEST(ReaderForeign, HeadersCannotPushPayloadsIntoTheNextRecord) {
  // Were it believed, records would overlap in an order that differs from their headers'.
  const std::vector<Record> records = records_of({50000, 70000, 10, 3 * kMiB});
  const std::string bytes = foreign_archive(
      records, 64, [](std::size_t i) { return std::size_t{i == 0 || i == 2 ? 65000u : 0u}; });
  for (const std::size_t n_threads : {0u, 2u}) {
    ArchiveReader reader(memory_source(bytes));
    reader.start(all_of(reader), n_threads, true, false);
    EXPECT_THROW(reader.wait_all(kNoPoll), LayoutMismatch);
    EXPECT_THROW(reader.start(all_of(reader), n_threads, true, true), FormatError);
  }
}

TEST(ReaderDamage, NoArchiveAtAll) {
  for (const std::string& bytes : {std::string(), std::string("PK\3\4"), noise(100000, 3)}) {
    EXPECT_THROW(ArchiveReader(memory_source(bytes)), MissingEndError);
    EXPECT_THROW(ArchiveReader(ArchiveFile(bytes).source()), MissingEndError);
  }
  const std::string bytes = archive(records_of({1000, 2000}));
  for (std::size_t nbytes = 0; nbytes < bytes.size(); nbytes += 37) {
    const std::string cut = bytes.substr(0, nbytes);
    EXPECT_THROW(ArchiveReader(memory_source(cut)), MissingEndError) << nbytes;
  }
}

TEST(ReaderDamage, NamesTheFile) {
  const auto file_in = [](const auto& function) -> std::string {
    try {
      function();
    } catch (const FormatError& error) {
      return error.path();
    }
    return "no error";
  };
  std::string bytes = archive(records_of({1000, 2000}));
  const ArchiveReader whole(memory_source(bytes));
  std::string payload(1000, '\0');
  const std::uint64_t offset = whole.stored_payload_offset(0);
  bytes[offset] ^= 1;
  EXPECT_EQ(file_in([&] { whole.read(0, offset, payload.data(), true); }), "memory");
  bytes[0] ^= 1;
  EXPECT_EQ(file_in([&] { static_cast<void>(whole.payload_offset(0)); }), "memory");
  EXPECT_EQ(file_in([&] { ArchiveReader(memory_source("PK")); }), "memory");
}

// ------------------------------------------------------------------- files that change, cancelling

TEST(Reader, AFileThatShrinksIsAnUnexpectedEnd) {
  const std::vector<Record> records = records_of({100, 6 * kMiB, 3 * kMiB});
  const std::string bytes = archive(records);
  for (const std::uint64_t nbytes : {0u, 100u, 4096u, 1000001u, 9000000u}) {
    for (const std::size_t n_threads : {0u, 3u}) {
      const ArchiveFile file(bytes);
      ArchiveReader reader(file.source());
      ASSERT_EQ(::truncate(file.path().c_str(), static_cast<off_t>(nbytes)), 0);
      reader.start(all_of(reader), n_threads, true, false);
      try {
        reader.wait_all(kNoPoll);
        FAIL() << nbytes;
      } catch (const IoError& error) {
        EXPECT_EQ(error.errnum(), 0);
        EXPECT_NE(error.operation().find("unexpected end of file"), std::string::npos);
        EXPECT_EQ(error.path(), file.path());
      }
    }
  }
}

TEST(Reader, AFileThatShrinksMeanwhileDoesNotHurt) {
  const std::vector<Record> records = records_of(std::vector<std::size_t>(10, kMiB));
  const std::string bytes = archive(records);
  for (int round = 0; round < 6; ++round) {
    const ArchiveFile file(bytes);
    file.drop_from_page_cache();
    ArchiveReader reader(file.source());
    reader.start(all_of(reader), 4, true, false);
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    ASSERT_EQ(::truncate(file.path().c_str(), 5000), 0);
    try {
      // The kernel may hand out the zeros of a page that is being cut off: that shows as damage.
      static_cast<void>(reader.wait_all(kNoPoll));
    } catch (const IoError& error) {
      EXPECT_EQ(error.errnum(), 0);
    } catch (const LayoutMismatch& error) {
      EXPECT_STRNE(error.what(), "");
    }
  }
}

struct Interrupt {};

TEST(Reader, CanBeCancelledAtAnyTime) {
  const std::vector<Record> records = records_of(std::vector<std::size_t>(24, kMiB));
  const ArchiveFile file(archive(records));
  const std::size_t threads = n_threads();
  for (int round = 0; round < 12; ++round) {
    file.drop_from_page_cache();
    ArchiveReader reader(file.source());
    if (round == 0) reader.cancel();  // before it has begun
    reader.start(all_of(reader), 4, true, false);
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    const LoadedPayload payload = reader.payload(20);
    if (round % 2 == 0) reader.cancel();
    payload.data[0] = std::byte{1};  // stays what it is
    if (round % 4 == 0) reader.cancel();
  }
  EXPECT_TRUE(n_threads_becomes(threads));
}

TEST(Reader, APollCancels) {
  const std::vector<Record> records = records_of(std::vector<std::size_t>(20, kMiB));
  const ArchiveFile file(archive(records));
  ArchiveReader reader(file.source());
  reader.start(all_of(reader), 0, true, false);
  EXPECT_THROW(reader.wait_all([] { throw Interrupt(); }), Interrupt);
  reader.cancel();
  EXPECT_LT(reader.nbytes_read(), reader.nbytes_to_read());
}

TEST(Reader, LeavesNoDescriptorsBehind) {
  const std::size_t descriptors = n_descriptors();
  const std::vector<Record> records = records_of({100, 3 * kMiB});
  const ArchiveFile file(archive(records));
  for (int i = 0; i < 10; ++i) expect_loads(file.source(), records, {}, 2);
  EXPECT_THROW(ArchiveReader(ArchiveFile("no archive").source()), FormatError);
  EXPECT_EQ(n_descriptors(), descriptors);
}

// ------------------------------------------------------------------------------ memory of payloads

TEST(ReaderMemory, PayloadsOutliveTheReaderAndAreFreedOneByOne) {
  const std::vector<Record> records = records_of({2 * kMiB, 5 * kMiB, 3 * kMiB, 100, 200});
  const std::string bytes = archive(records);
  std::vector<LoadedPayload> payloads;
  {
    ArchiveReader reader(memory_source(bytes));
    reader.start(all_of(reader), 3, true, false);
    EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
    for (const std::size_t i : all_of(reader)) payloads.push_back(reader.payload(i));
  }
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    EXPECT_TRUE(text_of(payloads[i]) == records[i].data) << i;
  }
  for (const std::size_t freed : {1u, 0u, 3u, 2u}) {
    const std::byte* const middle = payloads[freed].data + payloads[freed].nbytes / 2;
    EXPECT_TRUE(is_resident(middle));
    payloads[freed].owner = {};
    EXPECT_EQ(is_resident(middle), payloads[freed].nbytes < kMiB) << freed;
    payloads[freed] = {};
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      if (payloads[i].data == nullptr) continue;
      EXPECT_TRUE(text_of(payloads[i]) == records[i].data) << i;
    }
  }
  const std::byte* const last = payloads[4].data;
  payloads.clear();
  EXPECT_FALSE(is_resident(last)) << "the region has gone with the last of them";
}

TEST(ReaderMemory, SmallNeighboursKeepLittleOfEachOther) {
  const std::vector<Record> records = records_of(std::vector<std::size_t>(3000, 10000));
  const std::string bytes = archive(records);
  LoadedPayload kept;
  const std::byte* far = nullptr;
  {
    ArchiveReader reader(memory_source(bytes));
    reader.start(all_of(reader), 3, true, false);
    EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
    kept = reader.payload(5);
    far = reader.payload(2000).data;
  }
  EXPECT_TRUE(text_of(kept) == records[5].data);
  EXPECT_FALSE(is_resident(far));
}

TEST(ReaderMemory, PayloadsMayBeWrittenTo) {
  const std::vector<Record> records = records_of({5000, 5000, 5000});
  const std::string bytes = archive(records);
  ArchiveReader reader(memory_source(bytes));
  reader.start({0, 1, 2}, 0, true, false);
  EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
  std::ranges::fill_n(reader.payload(1).data, 5000, std::byte{7});
  EXPECT_TRUE(text_of(reader.payload(0)) == records[0].data);
  EXPECT_TRUE(text_of(reader.payload(2)) == records[2].data);
}

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
  const std::vector<std::span<std::byte>> memory{bytes_of(zero), {}, bytes_of(one)};
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
