// Files whose payloads are parts of other files, or of memory: archives, and a header and bytes.
#include "core/write/payloads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/written_archive.h"
#include "core/base/error.h"
#include "core/write/file_plan.h"
#include "core/write/writer.h"

namespace ptsave {
namespace {

using namespace common;

// Smaller than a chunk, across many, empty, and one that looks like a descriptor.
std::vector<Record> all_entries() {
  std::vector<Record> entries =
      records_of({0, 1, 5, 4096, 70'000, 63, 64, 65, 3 << 20, 0, 20'000, 9});
  entries.push_back({"lookalike", "PK\7\b" + noise(100, 5)});
  entries.push_back({"memory", noise(10'000, 6)});
  return entries;
}

// Payloads in two files, in another order and with gaps between them, and in memory.
class Sources {
 public:
  Sources(const std::vector<Record>& entries, const std::string& parent) : folder_(parent) {
    payloads_.resize(entries.size());
    for (std::size_t i = entries.size(); i-- > 0;) {
      if (entries[i].data.empty()) continue;
      if (entries[i].name == "memory") {
        memory_ = "in front" + entries[i].data;
        payloads_[i] = {2, 8, crc_of(entries[i].data)};
        continue;
      }
      std::string& file = contents_[i % 2];
      file += std::string(i * 37, '-');
      payloads_[i] = {i % 2, file.size(), crc_of(entries[i].data)};
      file += entries[i].data;
    }
    for (std::size_t i = 0; i < 2; ++i) write_file(path(i), contents_[i]);
  }

  std::string path(std::size_t i) const { return folder_ / std::to_string(i); }
  void make_cold() const {
    for (std::size_t i = 0; i < 2; ++i) drop_from_page_cache(path(i));
  }
  void flip(std::size_t record, std::uint64_t at) {
    const SourcePayload& payload = payloads_[record];
    contents_[payload.source][payload.offset + at] ^= 1;
    write_file(path(payload.source), contents_[payload.source]);
  }
  std::vector<ByteSource> open() const {
    return sources_of(file_source(path(0), DirectReads::kAlways),
                      file_source(path(1), DirectReads::kAlways), memory_source(memory_));
  }
  const std::vector<SourcePayload>& payloads() const { return payloads_; }

 private:
  Folder folder_;
  std::string contents_[2];
  std::string memory_;
  std::vector<SourcePayload> payloads_;
};

SourceStager::Buffers buffers_for(std::size_t chunk_nbytes, std::size_t n_threads) {
  return {max_staged_nbytes(align_up(chunk_nbytes, page_nbytes())),
          std::max<std::size_t>(n_threads, 1)};
}

struct Disk {
  std::string parent;
  bool cold;
};

class StagedFrom : public testing::TestWithParam<Disk> {
 protected:
  StagedFrom() : sources_(all_entries(), GetParam().parent) {
    if (GetParam().cold) sources_.make_cold();
  }

  Sources sources_;
};

TEST_P(StagedFrom, AnArchiveIsWhatItIsFromMemory) {
  const Scenario scenario(all_entries());
  const std::string expected = reference(all_entries());
  const std::vector<ByteSource> opened = sources_.open();
  for (const Target target : kTargets) {
    for (const std::size_t n_threads : {0u, 3u}) {
      for (const std::size_t chunk : {kChunk, std::size_t{1} << 20}) {
        SourceStager stager(opened, sources_.payloads(), buffers_for(chunk, n_threads));
        const WriteOptions options{
            .n_threads = n_threads, .chunk_nbytes = chunk, .stager = &stager};
        ASSERT_TRUE(scenario.write(target, options) == expected);
      }
    }
  }
}

TEST_P(StagedFrom, PackedPayloadsAreOneBehindTheOther) {
  const std::vector<Record> entries = all_entries();
  std::vector<std::uint64_t> sizes;
  for (const Record& entry : entries) sizes.push_back(entry.data.size());
  const Folder folder;
  const std::vector<ByteSource> opened = sources_.open();
  for (const std::size_t header_nbytes : {1u, 8u, 5000u}) {
    const std::string header = noise(header_nbytes, 9);
    std::string expected = header;
    for (const Record& entry : entries) expected += entry.data;
    for (const std::size_t chunk : {kChunk, std::size_t{1} << 20}) {
      for (const bool direct : {false, true}) {
        SourceStager stager(opened, sources_.payloads(), buffers_for(chunk, 3));
        std::vector<std::uint32_t> crcs;
        const WriteOptions options{
            .n_threads = 3, .chunk_nbytes = chunk, .stager = &stager, .check_crcs = [&](auto all) {
              crcs.assign(all.begin(), all.end());
            }};
        PackedBody body(header, sizes, stager, true, chunk);
        Progress progress{0};
        AtomicFile file(folder / "file", "file");
        if (direct) {
          ASSERT_EQ(direct_chunk_nbytes(file.file(), options), chunk);
          write_direct(body, file.file(), 0, options, progress, kNoPoll);
        } else {
          write_to_file(body, file.file(), 0, options, progress, kNoPoll);
        }
        file.commit(false);
        ASSERT_TRUE(read_file(folder / "file") == expected);
        EXPECT_EQ(progress, expected.size());
        for (std::size_t i = 0; i < entries.size(); ++i)
          EXPECT_EQ(crcs[i], crc_of(entries[i].data));
        EXPECT_TRUE(damaged_payloads(sources_.payloads(), crcs).empty());
      }
    }
  }
}

TEST_P(StagedFrom, DamageIsSeenBeforeTheFileIsThere) {
  sources_.flip(8, 1'000'000);
  sources_.flip(2, 4);
  const Scenario scenario(all_entries());
  const std::vector<ByteSource> opened = sources_.open();
  SourceStager stager(opened, sources_.payloads(), buffers_for(kChunk, 3));
  std::vector<std::size_t> damaged;
  const WriteOptions options{
      .n_threads = 3, .chunk_nbytes = kChunk, .stager = &stager, .check_crcs = [&](auto crcs) {
        for (const auto& each : damaged_payloads(sources_.payloads(), crcs)) {
          damaged.push_back(each.record);
        }
        throw FormatError("damaged", "it is");
      }};
  for (const Target target : kTargets) {
    damaged.clear();
    EXPECT_THROW(static_cast<void>(scenario.write(target, options)), FormatError);
    EXPECT_EQ(damaged, (std::vector<std::size_t>{2, 8}));
  }
}

TEST_P(StagedFrom, SourcesMayOverlap) {
  const std::vector<ByteSource> opened = sources_.open();
  const std::string file = read_file(sources_.path(0));
  const std::vector<SourcePayload> payloads{
      {0, 0, {}}, {0, 10, {}}, {0, 10, {}}, {0, 100, {}}, {0, 1000, {}}};
  const std::vector<std::uint64_t> sizes{3'000'000, 500, 500, 50'000, 10};
  std::string expected;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    expected += file.substr(payloads[i].offset, sizes[i]);
  SourceStager stager(opened, payloads, buffers_for(std::size_t{1} << 20, 0));
  const std::string no_header;
  PackedBody body(no_header, sizes, stager, true, std::size_t{1} << 20);
  const Folder folder;
  Progress progress{0};
  File written = File::open_for_writing(folder / "file");
  write_to_file(body, written, 0, {}, progress, kNoPoll);
  EXPECT_TRUE(read_file(folder / "file") == expected);
}

INSTANTIATE_TEST_SUITE_P(Disks, StagedFrom,
                         testing::Values(Disk{"/var/tmp", false}, Disk{"/var/tmp", true},
                                         Disk{"/dev/shm", false}),
                         [](const auto& each) {
                           return each.param.parent == "/dev/shm" ? "Memory"
                                  : each.param.cold               ? "Cold"
                                                                  : "Cached";
                         });

std::unique_ptr<StagedPieces> stage(SourceStager& stager, const std::vector<PayloadPiece>& pieces) {
  return stager.stage(0, pieces);
}

TEST(SourceStager, RefusesWhatIsNotThere) {
  const Folder folder;
  write_file(folder / "source", "0123456789");
  const std::vector<ByteSource> sources = sources_of(file_source(folder / "source"));
  const std::vector<SourcePayload> payloads{{0, 5, {}}, {1, 0, {}}, {}};
  SourceStager stager(sources, payloads, {100, 1});
  EXPECT_TRUE(stager.stages(1));
  EXPECT_FALSE(stager.stages(2));
  EXPECT_FALSE(stager.stages(3));
  EXPECT_THROW(stage(stager, {{0, 0, 6}}), IoError) << "too long";
  EXPECT_THROW(stage(stager, {{1, 0, 1}}), std::invalid_argument) << "no such source";
  EXPECT_EQ(text_of(stage(stager, {{0, 2, 3}})->data(), 3), "789") << "the buffer is free again";
}

TEST(SourceStager, ASinglePieceOfMemoryStaysWhereItIs) {
  const std::string memory = "0123456789";
  const std::vector<ByteSource> sources = sources_of(memory_source(memory));
  const std::vector<SourcePayload> payloads{{0, 5, {}}, {0, 0, {}}};
  SourceStager stager(sources, payloads, {100, 1});
  EXPECT_EQ(stage(stager, {{0, 2, 3}})->data(), data_of(memory) + 7);
  EXPECT_EQ(text_of(stage(stager, {{0, 2, 3}, {1, 0, 2}})->data(), 5), "78901");
  EXPECT_THROW(stage(stager, {{0, 2, 4}}), IoError) << "too long";
}

TEST(SourceStager, APayloadMayHaveParts) {
  const Folder folder;
  write_file(folder / "file", "0123456789");
  const std::string memory = "abcdefghij";
  const std::vector<ByteSource> sources =
      sources_of(file_source(folder / "file"), memory_source(memory));
  // 456 cdef 01 b
  const std::vector<SourcePart> parts{{0, 0, 4}, {3, 1, 2}, {7, 0, 0}, {9, 1, 1}};
  const std::string whole = "456cdef01b";
  const std::vector<SourcePayload> payloads{{0, 4, std::nullopt, parts}, {1, 0, {}}};
  SourceStager stager(sources, payloads, {100, 1});
  for (std::uint64_t begin = 0; begin < whole.size(); ++begin) {
    for (std::uint64_t n = 1; begin + n <= whole.size(); ++n) {
      EXPECT_EQ(text_of(stage(stager, {{0, begin, n}, {1, 3, 2}})->data(), n + 2),
                whole.substr(begin, n) + "de");
    }
  }
  EXPECT_EQ(text_of(stage(stager, {{0, 4, 2}})->data(), 2), "de") << "in memory";
}

TEST(SourceStager, ASourceThatBecameShorterIsAnError) {
  const Folder folder;
  write_file(folder / "source", noise(100'000, 1));
  const std::vector<ByteSource> sources = sources_of(file_source(folder / "source"));
  File::open_for_writing(folder / "source").truncate(50'000);
  const std::vector<SourcePayload> payloads{{0, 0, {}}};
  SourceStager stager(sources, payloads, {std::size_t{1} << 20, 1});
  EXPECT_THROW(stage(stager, {{0, 0, 100'000}}), IoError);
}

}  // namespace

}  // namespace ptsave
