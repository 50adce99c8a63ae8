#include "core/write/writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/written_archive.h"
#include "core/base/error.h"

namespace ptsave {
namespace {

using namespace common;

// ----------------------------------------------------------------------------------------- layouts

TEST(Writer, OneRecord) { Scenario(records_of({100})).check(); }
TEST(Writer, OnlyTheSerializationId) { Scenario({}).check(); }
TEST(Writer, EmptyRecordsOnly) { Scenario(records_of({0, 0, 0})).check(); }
TEST(Writer, ManyChunksOfOneRecord) { Scenario(records_of({1, 40 * kChunk + 5, 1})).check(); }
TEST(Writer, WholeChunks) { Scenario(records_of({kChunk, 2 * kChunk, 3 * kChunk})).check(); }
TEST(Writer, AlignedToAPage) { Scenario(records_of({1, kChunk, 0, 5, kChunk - 1}), 4096).check(); }
TEST(Writer, PaddingLongerThanAChunk) { Scenario(records_of({1, 2, 3}), 32768).check(); }
TEST(Writer, Unaligned) { Scenario(records_of({1, 5000, 3, 0, 70000}), 1).check(); }

TEST(Writer, ThousandsOfTinyRecords) {
  std::vector<std::size_t> sizes;
  sizes.reserve(3000);
  for (std::size_t i = 0; i < 3000; ++i) sizes.push_back(i % 41);
  const Scenario scenario(records_of(sizes));
  scenario.check();
  scenario.check(std::size_t{4} << 20);
}

TEST(Writer, LargePiecesAreWrittenFromWhereTheyAre) {
  // On both sides of the sizes at which pieces are gathered and cut.
  for (const std::size_t edge : {std::size_t{64} << 10, std::size_t{256} << 10}) {
    Scenario(records_of({edge - 1, edge, edge + 1, 10, 2 * edge + 1, 0, 7})).check(1 << 20);
  }
}

TEST(Writer, Holes) {
  std::vector<Record> entries = records_of({10, 5 * kChunk, 0, 3, kChunk, 100, 2 * kChunk});
  for (const std::size_t i : {std::size_t{1}, std::size_t{2}, std::size_t{5}}) {
    entries[i].hole = true;
  }
  const Scenario scenario(entries);
  scenario.check();
  for (Record& entry : entries) entry.hole = true;
  Scenario(entries).check();
}

TEST(Writer, PayloadsThatLookLikeDescriptors) {
  // torch's writer takes them for descriptors when it collects the CRCs for the serialization id.
  std::vector<Record> entries = records_of({100, 8, 5000});
  for (Record& entry : entries) entry.data.replace(0, 4, "PK\7\10");
  entries.push_back({"short", "PK\7\10abc"});
  Scenario(entries).check();
}

TEST(Writer, PayloadsThatLookLikeDescriptorsAreCutByChunks) {
  std::vector<Record> entries = records_of({3950, 100, 5000});
  for (std::size_t nbytes = 3800; nbytes < 4100; nbytes += 4) {
    entries[0].data = noise(nbytes, nbytes);
    entries[1].data.replace(0, 4, "PK\7\10");
    const Scenario scenario(entries, 4);
    ASSERT_TRUE(scenario.write(Target::kMemory, {true, 2, kChunk}) == reference(entries, 4));
  }
}

// Moves a sequence of every kind of part over a chunk boundary, byte by byte.
TEST(Writer, BoundariesCutEverything) {
  for (std::size_t nbytes = 3600; nbytes < kChunk + 100; ++nbytes) {
    const std::vector<Record> entries = records_of({nbytes, 0, 1, kChunk, 17});
    const Scenario scenario(entries, 1);
    const std::size_t n_threads = nbytes % 4 == 0 ? 2 : 0;
    ASSERT_TRUE(scenario.write(Target::kMemory, {true, n_threads, kChunk}) == reference(entries, 1))
        << nbytes << " bytes, threads " << n_threads;
    if (nbytes % 41 == 0) scenario.check();
  }
}

TEST(Writer, ChunksMuchSmallerThanAnything) {
  for (const std::size_t chunk : {1u, 3u, 16u, 24u, 63u, 64u, 65u, 100u}) {
    const Scenario scenario(records_of({0, 1, 200, 3, 64, 129}));
    for (const Target target : {Target::kMemory, Target::kStream, Target::kBuffered}) {
      for (const std::size_t n_threads : {0u, 4u}) {
        ASSERT_TRUE(scenario.write(target, {true, n_threads, chunk}) ==
                    reference(records_of({0, 1, 200, 3, 64, 129})))
            << chunk;
      }
    }
  }
}

TEST(Writer, DirectWritesTakeAnyChunkSize) {
  const std::vector<std::size_t> sizes{0, 1, 20000, 3, 9000, 129};
  for (const std::size_t chunk : {100u, 512u, 1000u, 4095u, 4097u, 6000u, 8192u, 12288u}) {
    ASSERT_TRUE(Scenario(records_of(sizes)).write(Target::kDirect, {true, 2, chunk}) ==
                reference(records_of(sizes)))
        << chunk;
  }
}

TEST(Writer, ManyThreads) {
  std::vector<std::size_t> sizes;
  sizes.reserve(300);
  for (std::size_t i = 0; i < 300; ++i) sizes.push_back(i % 7 == 0 ? 3 * kChunk + i : i);
  const std::string expected = reference(records_of(sizes));
  const Scenario scenario(records_of(sizes));
  for (const Target target : kTargets) {
    ASSERT_TRUE(scenario.write(target, {true, 16, kChunk}) == expected);
  }
}

TEST(Writer, WorksOnTmpfs) {
  const std::vector<Record> records = records_of({100, 5 * kChunk, 3});
  const Scenario scenario(records, 64, "/dev/shm");
  EXPECT_TRUE(scenario.write(Target::kDirect, {true, 2, kChunk}) == reference(records));
}

// -------------------------------------------------------------------------------- what is promised

TEST(Writer, AsksForPayloadsInOrderWithoutWorkers) {
  const std::vector<Record> entries = records_of({10, 5 * kChunk, 0, 3, kChunk, 100});
  const Scenario scenario(entries);
  for (const Target target : kTargets) {
    std::vector<std::size_t> asked;
    const std::thread::id owner = std::this_thread::get_id();
    const Payloads payloads = [&](std::size_t i) {
      EXPECT_EQ(std::this_thread::get_id(), owner);
      asked.push_back(i);
      return scenario.payloads()(i);
    };
    scenario.write(target, {true, 0, kChunk}, payloads);
    EXPECT_TRUE(std::ranges::is_sorted(asked));
    EXPECT_EQ(asked.back(), entries.size() - 1);
  }
}

TEST(Writer, MakesOnePayloadAtATime) {
  // The one before is gone when the next is made: nothing may be kept beyond that.
  const std::vector<Record> entries = records_of({10, 5 * kChunk, 3, 70000, kChunk, 100});
  const Scenario scenario(entries);
  for (const std::size_t chunk : {kChunk, std::size_t{1} << 20}) {
    std::string made;
    std::size_t made_index = ~std::size_t{0};
    const Payloads payloads = [&](std::size_t i) {
      if (i != made_index) {
        std::ranges::fill(made, 'X');
        made = entries[i].data;
        made_index = i;
      }
      return data_of(made);
    };
    for (const Target target : {Target::kBuffered, Target::kDirect, Target::kStream}) {
      made_index = ~std::size_t{0};
      EXPECT_TRUE(scenario.write(target, {true, 0, chunk}, payloads) == reference(entries));
    }
  }
}

TEST(Writer, ProgressNeverExceedsTheFile) {
  const Scenario scenario(records_of(std::vector<std::size_t>(200, 3 * kChunk)));
  Progress progress{0};
  std::uint64_t last = 0;
  const Poll poll = [&] {
    const std::uint64_t now = progress;
    EXPECT_GE(now, last);
    EXPECT_LE(now, scenario.layout().nbytes());
    last = now;
  };
  std::string out(scenario.layout().nbytes(), '\0');
  write_to_memory(scenario.layout(), scenario.payloads(), data_of(out), {true, 0, kChunk}, progress,
                  poll);
  EXPECT_GT(last, 0u);
}

struct Interrupt {};

TEST(Writer, APollCanCancelEveryTarget) {
  const Scenario scenario(records_of(std::vector<std::size_t>(100, 3 * kChunk)));
  const Folder folder;
  for (const std::size_t n_threads : {0u, 3u}) {
    const WriteOptions options{true, n_threads, kChunk};
    // With workers the first poll comes after 100 ms: payloads that take their time get there.
    const Payloads slow = [&](std::size_t i) {
      if (i > 0 && n_threads > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return scenario.payloads()(i);
    };
    const Poll interrupt = [] { throw Interrupt(); };
    Progress progress{0};
    std::string out(scenario.layout().nbytes(), '\0');
    EXPECT_THROW(
        write_to_memory(scenario.layout(), slow, data_of(out), options, progress, interrupt),
        Interrupt);
    AtomicFile file(folder / "file", "file");
    EXPECT_THROW(
        write_buffered(scenario.layout(), slow, file.file(), 0, options, progress, interrupt),
        Interrupt);
    EXPECT_THROW(write_direct(scenario.layout(), slow, file.file(), options, progress, interrupt),
                 Interrupt);
  }
  EXPECT_TRUE(folder.names().empty());
}

TEST(Writer, ErrorsOfThePayloadsComeOut) {
  const Scenario scenario(records_of({10, 5 * kChunk, 3, kChunk}));
  const Payloads failing = [&](std::size_t i) {
    if (i == 2) throw Interrupt();
    return scenario.payloads()(i);
  };
  std::string out(scenario.layout().nbytes(), '\0');
  for (const std::size_t n_threads : {0u, 1u, 4u}) {
    Progress progress{0};
    EXPECT_THROW(write_to_memory(scenario.layout(), failing, data_of(out),
                                 {true, n_threads, kChunk}, progress, kNoPoll),
                 Interrupt);
  }
}

TEST(Writer, ErrorsOfTheSinkComeOut) {
  const Scenario scenario(records_of({10, 5 * kChunk, 3, kChunk}));
  for (int failing = 0; failing < 8; ++failing) {
    int n_calls = 0;
    Progress progress{0};
    const StreamSink sink = [&](const std::byte*, std::uint64_t) {
      if (n_calls++ == failing) throw Interrupt();
    };
    EXPECT_THROW(
        write_to_stream(scenario.layout(), scenario.payloads(), sink, {true, 0, kChunk}, progress),
        Interrupt);
    EXPECT_EQ(n_calls, failing + 1) << "nothing is written after an error";
  }
}

TEST(Writer, ChecksumsAreThoseOfTheBytesWrittenIfAPayloadIsChangedMeanwhile) {
  const Scenario scenario(records_of({10, 50 * kChunk, 3, kChunk}));
  std::vector<std::string> live;
  for (std::size_t i = 0; i + 1 < scenario.layout().size(); ++i) {
    live.emplace_back(scenario.layout().record(i).nbytes, 'a');
  }
  const Payloads payloads = [&](std::size_t i) { return data_of(live[i]); };
  std::string file;
  char value = 'b';
  const StreamSink sink = [&](const std::byte* data, std::uint64_t nbytes) {
    for (std::string& payload : live) std::ranges::fill(payload, value);
    ++value;
    file.append(reinterpret_cast<const char*>(data), nbytes);
  };
  std::vector<std::uint32_t> crcs;
  WriteOptions options{true, 0, kChunk};
  options.check_crcs = [&](std::span<const std::uint32_t> all) {
    crcs.assign(all.begin(), all.end());
  };
  Progress progress{0};
  write_to_stream(scenario.layout(), payloads, sink, options, progress);
  for (std::size_t i = 0; i < live.size(); ++i) {
    const RecordLayout& record = scenario.layout().record(i);
    EXPECT_EQ(crcs[i], crc_of(file.substr(record.payload_offset, record.nbytes))) << i;
  }
}

TEST(Writer, AFullDeviceIsEnospc) {
  const Scenario scenario(records_of({10, 50 * kChunk, 3, kChunk}));
  for (const std::size_t n_threads : {0u, 1u, 4u}) {
    File full = File::open_for_writing("/dev/full");
    Progress progress{0};
    try {
      write_buffered(scenario.layout(), scenario.payloads(), full, 0, {true, n_threads, kChunk},
                     progress, kNoPoll);
      FAIL();
    } catch (const IoError& error) {
      EXPECT_EQ(error.errnum(), ENOSPC);
      EXPECT_EQ(error.path(), "/dev/full");
    }
  }
}

TEST(Writer, HolesTakeNoSpace) {
  std::vector<Record> entries = records_of({10, 0, 5});
  entries[1] = {"hole", std::string(std::size_t{8} << 20, 'x'), true};
  const Scenario scenario(entries);
  const Folder folder;
  AtomicFile file(folder / "file", "file");
  Progress progress{0};
  write_buffered(scenario.layout(), scenario.payloads(), file.file(), 0, {true, 2, kChunk},
                 progress, kNoPoll);
  struct stat status{};
  ASSERT_EQ(::fstat(file.file().fd(), &status), 0);
  EXPECT_LT(status.st_blocks * 512, 1 << 20);
}

}  // namespace
}  // namespace ptsave
