// Plans of files, written to every target.
#include "core/write/file_plan.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/written_archive.h"
#include "core/base/error.h"

namespace ptsave {
namespace {

using namespace common;

constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
const std::string kId = ".data/serialization_id";  // whose bytes are computed

PlannedRecords planned(const std::vector<Record>& entries) {
  PlannedRecords records;
  for (const Record& entry : entries) {
    records.add(std::string(entry.name), entry.data.size(),
                entry.hole ? nullptr : data_of(entry.data));
  }
  records.add(std::string(kId), kIdNbytes, data_of(kId));
  return records;
}

std::string stream_of(FilePlan& plan, const WriteOptions& options) {
  std::string stream;
  const StreamSink sink = [&](const std::byte* data, std::uint64_t nbytes) {
    stream += data == nullptr ? std::string(nbytes, '\0') : text_of(data, nbytes);
  };
  plan.write_stream(sink, options);
  return stream;
}

// Writes `entries` to each target of a plan.
void expect_written(ArchivePlan& plan, const std::vector<Record>& entries,
                    const WriteOptions& options) {
  const std::string expected = reference(entries, 64, options.compute_crcs);
  ASSERT_EQ(plan.nbytes(), expected.size());
  const Folder folder;
  const std::string path = folder / "file";
  for (const std::uint64_t direct : {std::uint64_t{0}, std::uint64_t{1}, kChunk + 1, kAll}) {
    for (const bool durable : {false, true}) {
      plan.write_file({path, "file", durable}, with_direct(options, direct), kNoPoll);
      EXPECT_TRUE(read_file(path) == expected) << direct << durable;
      EXPECT_EQ(plan.nbytes_written(), plan.nbytes());
    }
  }
  write_file(path, std::string(2 * expected.size(), 'x'));
  plan.write_in_place(path, std::nullopt, true, options, kNoPoll);
  EXPECT_TRUE(read_file(path) == expected);
  const Descriptor open(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::ftruncate(open.get(), 0), 0);
  plan.write_descriptor(open.get(), 100, "file", true, options, kNoPoll);
  EXPECT_TRUE(read_file(path).substr(100) == expected);
  std::string memory(expected.size(), 'x');
  plan.write_memory(bytes_of(memory), options, kNoPoll);
  EXPECT_TRUE(memory == expected);
  EXPECT_TRUE(stream_of(plan, options) == expected);
}

TEST(ArchivePlan, WritesTheSameToEveryTarget) {
  std::vector<Record> entries = records_of({0, 1, 5000, 100'000, 63, 64});
  for (const bool with_hole : {false, true}) {
    if (with_hole) entries.push_back({"hole", std::string(30'000, '\0'), true});
    ArchivePlan plan("archive", planned(entries), 64);
    EXPECT_EQ(plan.has_holes(), with_hole);
    EXPECT_FALSE(plan.is_sequential());
    EXPECT_FALSE(plan.is_pinned());
    for (const std::size_t n_threads : {0u, 3u}) {
      for (const bool compute_crcs : {true, false}) {
        expect_written(plan, entries, {compute_crcs, n_threads, kChunk});
      }
    }
  }
}

TEST(ArchivePlan, KnowsItsHoles) {
  PlannedRecords none;
  none.add("empty", 0, nullptr);
  EXPECT_FALSE(ArchivePlan("archive", std::move(none), 64).has_holes());
  PlannedRecords one;
  one.add("hole", 1, nullptr);
  EXPECT_TRUE(ArchivePlan("archive", std::move(one), 64).has_holes());
}

TEST(ArchivePlan, RefusesMemoryOfAnotherSize) {
  const std::vector<Record> entries = records_of({100});
  ArchivePlan plan("archive", planned(entries), 64);
  std::string memory(plan.nbytes() - 1, 'x');
  EXPECT_THROW(plan.write_memory(bytes_of(memory), {}, kNoPoll), std::invalid_argument);
}

TEST(ArchivePlan, MakesOnePayloadAtATimeOnThisThread) {
  const std::vector<Record> entries = records_of({10, 9'000, 0, 20'000, 77});
  std::string made;
  std::vector<std::size_t> order;
  std::set<std::thread::id> threads;
  PlannedRecords records;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    records.add_made(std::string(entries[i].name), entries[i].data.size(), [&, i] {
      made.assign(entries[i].data.size(), '?');  // the one before is gone
      made = entries[i].data;
      order.push_back(i);
      threads.insert(std::this_thread::get_id());
      return data_of(made);
    });
  }
  records.add(std::string(kId), kIdNbytes, data_of(kId));
  ArchivePlan plan("archive", std::move(records), 64);
  EXPECT_TRUE(plan.is_sequential());
  expect_written(plan, entries, {true, 3, kChunk});
  EXPECT_EQ(threads, std::set{std::this_thread::get_id()});
  order.clear();
  std::string memory(plan.nbytes(), 'x');
  plan.write_memory(bytes_of(memory), {true, 3, kChunk}, kNoPoll);
  EXPECT_EQ(order, (std::vector<std::size_t>{0, 1, 3, 4})) << "an empty one is not asked for";
}

TEST(ArchivePlan, WritesAgainAfterAMakerHasThrown) {
  const std::vector<Record> entries = records_of({10, 9'000});
  bool fails = true;
  PlannedRecords records;
  records.add(std::string(entries[0].name), 10, data_of(entries[0].data));
  records.add_made(std::string(entries[1].name), 9'000, [&] {
    if (std::exchange(fails, false)) throw std::runtime_error("not yet");
    return data_of(entries[1].data);
  });
  records.add(std::string(kId), kIdNbytes, data_of(kId));
  ArchivePlan plan("archive", std::move(records), 64);
  const Folder folder;
  EXPECT_THROW(plan.write_file({folder / "file", "file"}, {}, kNoPoll), std::runtime_error);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  expect_written(plan, entries, {true, 0, kChunk});
}

TEST(ArchivePlan, KeepsWhatItWritesUntilItIsReleased) {
  const std::vector<Record> entries = records_of({100});
  const auto owner = std::make_shared<int>(1);
  PlannedRecords records = planned(entries);
  records.keep(owner);
  ArchivePlan plan("archive", std::move(records), 64);
  EXPECT_EQ(owner.use_count(), 2);
  plan.release();
  EXPECT_EQ(owner.use_count(), 1);
  const Folder folder;
  EXPECT_THROW(plan.write_file({folder / "file", "file"}, {}, kNoPoll), std::invalid_argument);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// ------------------------------------------------------------------------------- staged payloads

// Copies of pieces of records.
class CopyingStager final : public Stager {
 public:
  explicit CopyingStager(std::vector<std::string>& payloads) : payloads_(payloads) {}

  bool stages(std::size_t record) const override { return record < payloads_.size(); }
  std::unique_ptr<StagedPieces> stage(std::size_t /*chunk*/,
                                      std::span<const PayloadPiece> pieces) override {
    auto copies = std::make_unique<Copies>();
    for (const PayloadPiece& piece : pieces) {
      copies->bytes += payloads_[piece.record].substr(piece.offset, piece.nbytes);
    }
    return copies;
  }

 private:
  struct Copies final : StagedPieces {
    const std::byte* data() const override { return data_of(bytes); }
    std::string bytes;
  };

  std::vector<std::string>& payloads_;
};

// What an accelerator is: payloads that may change, and that a forked child must not touch.
class Accelerator final : public PayloadStaging {
 public:
  Accelerator(std::vector<std::string>& payloads, bool& abandoned)
      : payloads_(payloads), abandoned_(abandoned) {}

  std::unique_ptr<Stager> begin_write(WriteOptions& options) override {
    auto stager = std::make_unique<CopyingStager>(payloads_);
    options.stager = stager.get();
    return stager;
  }
  std::unique_ptr<Stager> hand_over() override {
    return std::make_unique<CopyingStager>(payloads_);
  }
  bool is_pinned() const override { return true; }
  void abandon() override { abandoned_ = true; }

 private:
  std::vector<std::string>& payloads_;
  bool& abandoned_;
};

class StagedPlan : public testing::Test {
 protected:
  StagedPlan() {
    PlannedRecords records;
    for (const Record& entry : entries_) {
      records.add_staged(std::string(entry.name), entry.data.size());
      payloads_.push_back(entry.data);
    }
    records.add(std::string(kId), kIdNbytes, data_of(kId));
    plan_ = std::make_unique<ArchivePlan>("archive", std::move(records), 64,
                                          std::make_unique<Accelerator>(payloads_, abandoned_));
  }

  const std::vector<Record> entries_ = records_of({10, 20'000, 5000});
  const WriteOptions options_{true, 2, kChunk};
  std::vector<std::string> payloads_;
  bool abandoned_ = false;
  std::unique_ptr<ArchivePlan> plan_;
};

TEST_F(StagedPlan, WritesWhatAStagerBrings) {
  EXPECT_TRUE(plan_->is_pinned());
  expect_written(*plan_, entries_, options_);
}

TEST_F(StagedPlan, WritesWhatThereWasWhenItWasStaged) {
  plan_->begin_staging(kChunk);
  EXPECT_TRUE(plan_->is_pinned());
  plan_->stage(2, kNoPoll);
  for (std::string& payload : payloads_) std::ranges::fill(payload, '!');
  std::string memory(plan_->nbytes(), 'x');
  for (int i = 0; i < 2; ++i) {
    plan_->write_memory(bytes_of(memory), options_, kNoPoll);
    EXPECT_TRUE(memory == reference(entries_));
  }
  WriteOptions other = options_;
  other.chunk_nbytes = 2 * kChunk;
  EXPECT_THROW(plan_->write_memory(bytes_of(memory), other, kNoPoll), std::logic_error);
}

TEST_F(StagedPlan, IsAbandonedWithoutTouchingTheAccelerator) {
  plan_->abandon();
  EXPECT_TRUE(abandoned_);
  EXPECT_FALSE(plan_->is_pinned());
  std::string memory(plan_->nbytes(), 'x');
  EXPECT_THROW(plan_->write_memory(bytes_of(memory), options_, kNoPoll), std::invalid_argument);
}

TEST_F(StagedPlan, HasOneOriginOfPayloads) {
  EXPECT_THROW(plan_->read_from(nullptr, {}), std::invalid_argument);
  plan_->begin_staging(kChunk);
  EXPECT_THROW(plan_->read_from(nullptr, {}), std::invalid_argument);
}

// ------------------------------------------------------------------------------ payloads of files

SharedSources memory_sources(const std::string& bytes) {
  return std::make_shared<const std::vector<ByteSource>>(sources_of(memory_source(bytes)));
}

class PlanOfSources : public testing::Test {
 protected:
  PlanOfSources() {
    for (const Record& entry : entries_) {
      sourced_.push_back({entry.name, {0, source_.size(), crc_of(entry.data)}});
      source_ += entry.data + "gap";
      records_.add(std::string(entry.name), entry.data.size(), nullptr);
    }
    records_.add(std::string(kId), kIdNbytes, data_of(kId));
  }

  const std::vector<Record> entries_ = records_of({10, 20'000, 5000});
  const WriteOptions options_{true, 2, kChunk};
  std::vector<ArchivePlan::NamedSource> sourced_;
  std::string source_;
  PlannedRecords records_;
};

TEST_F(PlanOfSources, ReadsPayloadsByName) {
  ArchivePlan plan("archive", std::move(records_), 64);
  std::ranges::reverse(sourced_);
  plan.read_from(memory_sources(source_), sourced_);
  EXPECT_FALSE(plan.is_pinned());
  plan.begin_staging(kChunk);  // nothing to do
  plan.stage(2, kNoPoll);
  expect_written(plan, entries_, options_);
  EXPECT_TRUE(plan.damaged().empty());
}

TEST_F(PlanOfSources, RefusesARecordThatIsNotThere) {
  ArchivePlan plan("archive", std::move(records_), 64);
  sourced_[1].record = "data/7";
  EXPECT_THROW(plan.read_from(memory_sources(source_), sourced_), std::invalid_argument);
  EXPECT_FALSE(plan.is_pinned());
}

TEST_F(PlanOfSources, PublishesNoFileWithDamagedPayloads) {
  ArchivePlan plan("archive", std::move(records_), 64);
  sourced_[1].payload.crc = crc_of(entries_[1].data) ^ 1;
  plan.read_from(memory_sources(source_), sourced_);
  const Folder folder;
  for (const std::uint64_t direct : {std::uint64_t{0}, kChunk + 1, kAll}) {
    EXPECT_THROW(
        plan.write_file({folder / "file", "file", false}, with_direct(options_, direct), kNoPoll),
        FormatError);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    ASSERT_EQ(plan.damaged().size(), 1u);
    EXPECT_EQ(plan.record_name(plan.damaged()[0].record), "data/1");
    EXPECT_EQ(plan.damaged()[0].crc, crc_of(entries_[1].data));
  }
}

// ---------------------------------------------------------------------------------------- packed

class Packed : public testing::Test {
 protected:
  std::unique_ptr<PackedPlan> plan(SharedSources sources, std::uint32_t wrong = 0) const {
    std::vector<std::uint64_t> sizes;
    std::vector<SourcePayload> payloads;
    std::uint64_t offset = header_.size();
    for (const std::string& payload : payloads_) {
      sizes.push_back(payload.size());
      payloads.push_back({0, offset, crc_of(payload) ^ wrong});
      offset += payload.size();
    }
    return std::make_unique<PackedPlan>(
        header_, sizes, std::make_unique<SourcedPayloads>(std::move(sources), std::move(payloads)));
  }

  const std::string header_ = "a header\n";
  const std::vector<std::string> payloads_{noise(10, 1), "", noise(50'000, 2)};
  const std::string file_ = header_ + payloads_[0] + payloads_[2];
  const WriteOptions options_{true, 2, kChunk};
  const Folder folder_;
};

TEST_F(Packed, WritesHeaderAndPayloads) {
  const auto packed = plan(memory_sources(file_));
  EXPECT_EQ(packed->nbytes(), file_.size());
  EXPECT_FALSE(packed->is_pinned());
  EXPECT_FALSE(packed->has_holes());
  EXPECT_FALSE(packed->is_sequential());
  for (const std::uint64_t direct : {std::uint64_t{0}, kChunk + 1, kAll}) {
    packed->write_file({folder_ / "file", "file", true}, with_direct(options_, direct), kNoPoll);
    EXPECT_TRUE(read_file(folder_ / "file") == file_);
    EXPECT_EQ(packed->nbytes_written(), file_.size());
    EXPECT_TRUE(packed->damaged().empty());
  }
  EXPECT_TRUE(stream_of(*packed, options_) == file_);
}

TEST_F(Packed, OverwritesTheFileThatItReadsByWayOfAnother) {
  const std::string path = folder_ / "file";
  write_file(path, file_);
  const auto packed = plan(std::make_shared<const std::vector<ByteSource>>(
      sources_of(file_source(path, DirectReads::kNever))));
  const File scratch = File::open_for_writing(folder_ / "scratch");
  packed->write_in_place(path, scratch.fd(), false, options_, kNoPoll);
  EXPECT_TRUE(read_file(path) == file_);
}

TEST_F(Packed, PublishesNoFileWithDamagedPayloads) {
  const auto packed = plan(memory_sources(file_), 1);
  EXPECT_THROW(packed->write_file({folder_ / "file", "file"}, options_, kNoPoll), FormatError);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  EXPECT_EQ(packed->damaged().size(), 3u);
  WriteOptions unchecked = options_;
  unchecked.compute_crcs = false;
  packed->write_file({folder_ / "file", "file"}, unchecked, kNoPoll);
  EXPECT_TRUE(read_file(folder_ / "file") == file_);
  EXPECT_TRUE(packed->damaged().empty());
}

}  // namespace
}  // namespace ptsave
