// Writes that share pieces with an older file.  A simulated file server copies the pieces, so these
// tests run on every file system.
#include "core/write/sharing.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/written_archive.h"
#include "core/base/error.h"
#include "core/io/system.h"
#include "core/memory/pages.h"
#include "core/read/reader.h"
#include "core/write/file_plan.h"

namespace ptsave {
namespace {

using namespace common;

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
const std::string kId = ".data/serialization_id";  // whose bytes are computed

// Records of many sizes, around those of pages, of pieces, and of the smallest shared payload.
std::vector<Record> many_records() {
  return records_of({0, 1, 5000, 4 * kPage - 1, 4 * kPage, 6 * kPage + 5, 16 * kPage, 65'537,
                     300'001, 1'000'000, 3, 2 * kMiB, 17 * kPage});
}

ArchivePlan plan_of(const std::vector<Record>& entries, std::uint64_t alignment) {
  PlannedRecords records;
  for (const Record& entry : entries) {
    records.add(std::string(entry.name), entry.data.size(), data_of(entry.data));
  }
  records.add(std::string(kId), kIdNbytes, data_of(kId));
  return {"archive", std::move(records), alignment};
}

std::vector<IndexedRecord> records_in(const std::string& path) {
  const ArchiveReader archive(ByteSource(File::open_for_reading(path), 0));
  const auto records = archive.index().records();
  return {records.begin(), records.end()};
}

// Calls `action` before each system call of a name, with the number of the call.  It returns an
// errno, or 0 for a call that succeeds.
class Hook {
 public:
  using Action = std::function<int(int n)>;

  Hook(std::string_view call, Action action) : call_(call), action_(std::move(action)) {
    active = this;
    sys::fault_hook = [](const char* name, std::size_t* /*nbytes*/) {
      return name == active->call_ ? active->action_(++active->n_calls_) : 0;
    };
  }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;
  ~Hook() { sys::fault_hook = nullptr; }

  int n_calls() const { return n_calls_; }

 private:
  static inline Hook* active = nullptr;
  const std::string_view call_;
  const Action action_;
  std::atomic<int> n_calls_ = 0;  // of all threads
};

class SharingTest : public testing::Test {
 protected:
  SharingTest() { sys::server_hook = true; }
  ~SharingTest() override { sys::server_hook = false; }

  // Writes the older file, and keeps its hashes.
  void write_base(const std::vector<Record>& entries, std::uint64_t alignment,
                  const WriteOptions& options) {
    ArchivePlan plan = plan_of(entries, alignment);
    Sharing sharing(std::nullopt);
    plan.prepare(sharing, {});
    plan.write_file({base_, base_}, options, kNoPoll, &sharing);
    ASSERT_TRUE(read_file(base_) == reference(entries, alignment, options.compute_crcs));
    ASSERT_TRUE(sharing.hashed());
    EXPECT_EQ(sharing.hashed()->identity, File::open_for_reading(base_).identity());
    EXPECT_EQ(sharing.nbytes_shared(), 0u);
    hashes_ = sharing.hashed()->hashes;
  }

  Sharing sharing(bool is_hashed) const {
    return Sharing(Sharing::Base{ByteSource(File::open_for_reading(base_), 0, DirectReads::kAlways),
                                 is_hashed ? hashes_ : nullptr});
  }

  // Writes a file, and returns the number of shared bytes.
  std::uint64_t write(ArchivePlan& plan, Sharing& sharing, const WriteOptions& options,
                      std::span<const IndexedRecord> records) const {
    plan.prepare(sharing, records);
    plan.write_file({path_, path_}, options, kNoPoll, &sharing);
    return sharing.nbytes_shared();
  }

  // Writes `entries` with and without the base's hashes; the bytes must be those of a write without
  // a base.  Returns the number of shared bytes, which is the same if `is_exact`.
  std::uint64_t write_both(const std::vector<Record>& entries, std::uint64_t alignment,
                           const WriteOptions& options, bool is_exact = true) const {
    const std::string expected = reference(entries, alignment, options.compute_crcs);
    const std::vector<IndexedRecord> records = records_in(base_);
    std::uint64_t shared[2] = {};
    for (const bool is_hashed : {false, true}) {
      ArchivePlan plan = plan_of(entries, alignment);
      Sharing sharing = this->sharing(is_hashed);
      shared[is_hashed ? 1 : 0] = write(plan, sharing, options, records);
      EXPECT_TRUE(read_file(path_) == expected);
    }
    if (is_exact) {
      EXPECT_EQ(shared[0], shared[1]);
    }
    return shared[1];
  }

  Folder folder_;
  const std::string base_ = folder_ / "base.pt";
  const std::string path_ = folder_ / "new.pt";
  std::shared_ptr<const FileHashes> hashes_;
};

// The whole pages of payloads that are large enough.
std::uint64_t n_shareable(const std::vector<Record>& entries, std::uint64_t alignment) {
  const ArchiveLayout layout = plan("archive", specs_of(entries), alignment);
  std::uint64_t n = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const RecordLayout& record = layout.record(i);
    const std::uint64_t begin = align_up(record.payload_offset, kPage);
    const std::uint64_t end = align_down(record.payload_end(), kPage);
    if (end >= begin + 4 * kPage) n += end - begin;
  }
  return n;
}

TEST_F(SharingTest, FilesHaveTheSameBytes) {
  const std::vector<Record> entries = many_records();
  std::vector<Record> changed = entries;  // each a byte, at another place
  for (std::size_t i = 0; i < changed.size(); ++i) {
    std::string& data = changed[i].data;
    if (!data.empty()) data[i * data.size() / changed.size()] ^= 1;
  }
  const WriteOptions cached{true, 0, 0};
  const WriteOptions both = with_direct({true, 3, 0}, 1'000'000);
  const WriteOptions direct = with_direct({false, 3, 0}, kAll);
  for (const std::uint64_t alignment : {1u, 64u, 4096u}) {
    const std::uint64_t n = n_shareable(entries, alignment);
    for (const std::size_t chunk : {std::size_t{50'000}, std::size_t{100'003}, 3 * kMiB}) {
      for (WriteOptions options : {cached, both, direct}) {
        options.chunk_nbytes = chunk;
        SCOPED_TRACE(testing::Message() << "alignment " << alignment << ", chunks of " << chunk
                                        << ", " << options.n_threads << " threads");
        ASSERT_NO_FATAL_FAILURE(write_base(entries, alignment, options));
        const std::uint64_t shared = write_both(entries, alignment, options);
        if (chunk % kPage == 0) {
          EXPECT_EQ(shared, n);
        } else {
          EXPECT_GT(shared, n * 8 / 10);
        }
        const std::uint64_t some = write_both(changed, alignment, options, false);
        EXPECT_GT(some, n / 2);
        EXPECT_LT(some, shared);
      }
    }
  }
}

TEST_F(SharingTest, RecordsMayMoveByPages) {
  std::vector<Record> entries = records_of({10, 3 * kMiB, 20'000, 70'000});
  const WriteOptions options{true, 2, kMiB};
  write_base(entries, kPage, options);
  for (const std::size_t nbytes : {kPage, 7 * kPage + 1, std::uint64_t{kMiB} + 5}) {
    entries[0].data = noise(nbytes, nbytes);
    // At the edges of chunks, pieces are smaller than those whose hashes are known.
    EXPECT_EQ(write_both(entries, kPage, options),
              n_shareable(entries, kPage) -
                  (align_down(nbytes, kPage) >= 4 * kPage ? align_down(nbytes, kPage) : 0));
  }
  write_base(entries, 64, options);
  entries[0].data += std::string(64, 'x');
  EXPECT_EQ(write_both(entries, 64, options), 0u);  // no page is at the place of a page
}

TEST_F(SharingTest, RecordsOfAnotherSizeOrNameAreWritten) {
  std::vector<Record> entries = records_of({2 * kMiB, 100'000});
  const WriteOptions options{true, 0, kMiB};
  write_base(entries, kPage, options);
  entries[1].data.pop_back();
  EXPECT_EQ(write_both(entries, kPage, options), 2 * kMiB);
  entries[0].name = "data/x";
  EXPECT_EQ(write_both(entries, kPage, options), 0u);
}

TEST_F(SharingTest, SmallFilesAreWritten) {
  const std::vector<Record> entries = records_of({kMiB - 4 * kPage});
  ArchivePlan plan = plan_of(entries, 64);
  Sharing sharing(std::nullopt);
  plan.prepare(sharing, {});
  plan.write_file({path_, path_}, {}, kNoPoll, &sharing);
  EXPECT_TRUE(read_file(path_) == reference(entries));
  EXPECT_FALSE(sharing.hashed());
}

TEST_F(SharingTest, UnchangedPiecesOfUnknownHashesAreReadTogether) {
  const std::vector<Record> entries = records_of({8 * kMiB});
  const WriteOptions options{true, 2, kMiB};
  write_base(entries, kPage, options);
  const std::vector<IndexedRecord> records = records_in(base_);
  const File base = File::open_for_reading(base_);
  base.sync();
  for (const bool is_cached : {true, false}) {
    if (!is_cached) {
      ASSERT_EQ(::posix_fadvise(base.fd(), 0, 0, POSIX_FADV_DONTNEED), 0);
    }
    ArchivePlan plan = plan_of(entries, kPage);
    Sharing sharing = this->sharing(false);
    const Hook hook("pread", [](int /*n*/) { return 0; });
    EXPECT_EQ(write(plan, sharing, options, records), 8 * kMiB);
    EXPECT_LE(hook.n_calls(), 9 * 5);  // a piece of each chunk, then four pieces at a time
    EXPECT_TRUE(read_file(path_) == reference(entries, kPage));
  }
}

TEST_F(SharingTest, APlanMayBeWrittenTwice) {
  const std::vector<Record> entries = records_of({2 * kMiB, 100'000});
  write_base(entries, 64, {true, 2, kMiB});
  ArchivePlan plan = plan_of(entries, 64);
  Sharing sharing = this->sharing(false);
  const std::uint64_t shared = write(plan, sharing, {true, 2, kMiB}, records_in(base_));
  EXPECT_GT(shared, 2 * kMiB);
  EXPECT_EQ(write(plan, sharing, {true, 2, kMiB}, records_in(base_)), shared);
  EXPECT_TRUE(read_file(path_) == read_file(base_));
}

TEST_F(SharingTest, ChecksumsAreRightIfPayloadsChangeMeanwhile) {
  const std::vector<Record> entries = records_of({10, 3 * kMiB, 20'000, 70'000, kMiB});
  const WriteOptions plain{true, 0, kMiB};
  write_base(entries, kPage, plain);
  for (const std::string_view call : {"pread", "pwrite", "clone_range", "copy_range"}) {
    for (const bool is_hashed : {false, true}) {
      std::vector<Record> live = entries;
      live[1].data[kMiB + 7] ^= 1;
      ArchivePlan plan = plan_of(live, kPage);
      Sharing sharing = this->sharing(is_hashed);
      std::vector<std::uint32_t> crcs;
      WriteOptions options = plain;
      options.check_crcs = [&](std::span<const std::uint32_t> all) {
        crcs.assign(all.begin(), all.end());
      };
      const std::vector<IndexedRecord> records = records_in(base_);
      const Hook hook(call, [&](int n) {
        for (std::size_t i = 0; i < live.size(); ++i) {
          // Every second time, the bytes are those of the base again.
          std::string& data = live[i].data;
          std::ranges::copy(n % 2 == 0 ? entries[i].data : noise(data.size(), 50 + i),
                            data.begin());
        }
        return 0;
      });
      write(plan, sharing, options, records);
      EXPECT_TRUE(hook.n_calls() > 0 || (call == "pread" && is_hashed)) << call;
      const std::string file = read_file(path_);
      const ArchiveLayout layout = ptsave::plan("archive", specs_of(live), kPage);
      for (std::size_t i = 0; i < live.size(); ++i) {
        const RecordLayout& record = layout.record(i);
        EXPECT_EQ(crcs[i], crc_of(file.substr(record.payload_offset, record.nbytes)))
            << call << " " << i;
      }
    }
  }
}

// Payloads that are copied in pieces of odd sizes, which are valid only for a moment.
class SlowCopies final : public ArrivingPayloads {
 public:
  void read(const std::byte* copy, std::size_t nbytes, const Use& use) override {
    constexpr std::size_t kPieceNbytes = 70'001;
    for (std::size_t done = 0; done < nbytes;) {
      std::string piece = text_of(copy + done, std::min(nbytes - done, kPieceNbytes));
      use(bytes_of(piece));
      std::ranges::fill(piece, '?');
      done += piece.size();
    }
  }
  void peek(const std::byte* copy, std::span<std::byte> out) override {
    std::memcpy(out.data(), copy, out.size());
  }
};

TEST_F(SharingTest, PayloadsMayArriveDuringTheWrite) {
  std::vector<Record> entries = many_records();
  write_base(entries, 64, {true, 2, kMiB});
  entries[9].data[500'000] ^= 1;
  for (const bool is_hashed : {false, true}) {
    ArchivePlan plan = plan_of(entries, 64);
    SlowCopies copies;
    plan.follow(copies);
    Sharing sharing = this->sharing(is_hashed);
    EXPECT_GT(write(plan, sharing, {true, 2, kMiB}, records_in(base_)), 2 * kMiB);
    EXPECT_TRUE(read_file(path_) == reference(entries));
  }
}

// --------------------------------------------------------------------------- bases that are wrong

TEST_F(SharingTest, ABaseThatLiesAboutItsRecords) {
  const std::vector<Record> entries = records_of({10, 2 * kMiB, 100'000});
  const WriteOptions options{true, 2, kMiB};
  write_base(entries, kPage, options);
  const std::uint64_t nbytes = read_file(base_).size();
  const std::vector<IndexedRecord> found = records_in(base_);
  for (const std::uint64_t offset :
       {std::uint64_t{0}, kPage, nbytes - 1, align_down(nbytes, kPage), align_up(nbytes, kPage),
        std::uint64_t{1} << 62, std::uint64_t{1} << 63, kAll, kAll - kPage + 1,
        kAll - 2 * kMiB + 1}) {
    for (const bool is_hashed : {false, true}) {
      std::vector<IndexedRecord> records = found;
      for (IndexedRecord& record : records) record.payload_offset = offset;
      records.insert(records.end(), found.begin(), found.end());  // each name twice
      ArchivePlan plan = plan_of(entries, kPage);
      Sharing sharing = this->sharing(is_hashed);
      EXPECT_EQ(write(plan, sharing, options, records), 0u) << offset;
      EXPECT_TRUE(read_file(path_) == reference(entries, kPage)) << offset;
    }
  }
}

TEST_F(SharingTest, ABaseThatIsShorterOrLonger) {
  const std::vector<Record> entries = records_of({10, 2 * kMiB, 100'000});
  const WriteOptions options{true, 2, kMiB};
  write_base(entries, kPage, options);
  const std::vector<IndexedRecord> records = records_in(base_);
  const std::string whole = read_file(base_);
  for (const std::size_t nbytes : {std::size_t{0}, std::size_t{5000}, kMiB, kMiB + 1,
                                   whole.size() - 1, whole.size() + 100'000}) {
    write_file(base_, (whole + noise(100'000, 5)).substr(0, nbytes));
    ArchivePlan plan = plan_of(entries, kPage);
    Sharing sharing = this->sharing(false);
    const std::uint64_t shared = write(plan, sharing, options, records);
    EXPECT_LE(shared, nbytes);
    EXPECT_EQ(shared > 0, nbytes >= kMiB);
    EXPECT_TRUE(read_file(path_) == reference(entries, kPage)) << nbytes;
  }
}

TEST_F(SharingTest, ABaseThatIsCutDuringTheWriteIsNoSilentError) {
  const std::vector<Record> entries = records_of({10, 2 * kMiB, 100'000});
  const WriteOptions options{true, 0, kMiB};
  for (const bool is_hashed : {false, true}) {
    write_base(entries, kPage, options);
    write_file(path_, "old");
    const std::vector<IndexedRecord> records = records_in(base_);
    ArchivePlan plan = plan_of(entries, kPage);
    Sharing sharing = this->sharing(is_hashed);
    const Hook hook("copy_range",
                    [&](int n) { return n == 2 ? ::truncate(base_.c_str(), kPage) : 0; });
    EXPECT_THROW(write(plan, sharing, options, records), IoError);
    EXPECT_EQ(read_file(path_), "old");
  }
}

// -------------------------------------------------------------------------------- calls that fail

TEST_F(SharingTest, CallsThatFail) {
  std::vector<Record> entries = many_records();
  const WriteOptions options{true, 0, kMiB};
  write_base(entries, 64, options);
  entries[9].data[500'000] ^= 1;
  const std::vector<IndexedRecord> records = records_in(base_);
  const std::string expected = reference(entries);
  for (const bool is_hashed : {false, true}) {
    for (int failing = 1;; ++failing) {
      ArchivePlan plan = plan_of(entries, 64);
      Sharing sharing = this->sharing(is_hashed);
      const Hook hook("copy_range", [&](int n) { return n == failing ? EIO : 0; });
      const std::uint64_t shared = write(plan, sharing, options, records);
      EXPECT_EQ(shared == 0, failing == 1);  // the first call shows that sharing is possible
      EXPECT_TRUE(read_file(path_) == expected) << failing;
      if (hook.n_calls() < failing) break;
    }
  }
}

TEST_F(SharingTest, EveryCallFailsAfterSome) {
  const std::vector<Record> entries = many_records();
  const WriteOptions options{true, 2, kMiB};
  write_base(entries, 64, options);
  const std::vector<IndexedRecord> records = records_in(base_);
  for (const int n_good : {1, 2, 4}) {
    ArchivePlan plan = plan_of(entries, 64);
    Sharing sharing = this->sharing(true);
    const Hook hook("copy_range", [&](int n) { return n > n_good ? EIO : 0; });
    write(plan, sharing, options, records);
    EXPECT_TRUE(read_file(path_) == reference(entries));
  }
}

TEST_F(SharingTest, ABaseThatCannotBeRead) {
  const std::vector<Record> entries = many_records();
  const WriteOptions options{true, 0, kMiB};
  write_base(entries, 64, options);
  const std::vector<IndexedRecord> records = records_in(base_);
  ArchivePlan plan = plan_of(entries, 64);
  Sharing sharing = this->sharing(false);
  const Hook hook("pread", [](int) { return EIO; });
  EXPECT_EQ(write(plan, sharing, options, records), 0u);
  EXPECT_GT(hook.n_calls(), 0);
  EXPECT_TRUE(read_file(path_) == reference(entries));
}

TEST_F(SharingTest, AFullDisk) {
  const std::vector<Record> entries = many_records();
  const WriteOptions options{true, 0, kMiB};
  write_base(entries, 64, options);
  const std::vector<IndexedRecord> records = records_in(base_);
  for (const int errnum : {ENOSPC, EDQUOT, EOPNOTSUPP, EIO}) {
    write_file(path_, "old");
    ArchivePlan plan = plan_of(entries, 64);
    Sharing sharing = this->sharing(true);
    const Hook hook("fallocate", [&](int) { return errnum; });
    if (errnum == EIO) {
      EXPECT_THROW(write(plan, sharing, options, records), IoError);
      EXPECT_EQ(read_file(path_), "old");
    } else {  // shared pieces need no space
      EXPECT_GT(write(plan, sharing, options, records), 2 * kMiB);
      EXPECT_TRUE(read_file(path_) == reference(entries));
    }
  }
}

TEST_F(SharingTest, AWriteThatFailsLeavesTheOldFile) {
  std::vector<Record> entries = many_records();
  const WriteOptions options{true, 2, kMiB};
  write_base(entries, 64, options);
  const std::vector<IndexedRecord> records = records_in(base_);
  entries[9].data[500'000] ^= 1;
  for (const std::string_view call : {"pwrite", "ftruncate", "renameat"}) {
    write_file(path_, "old");
    ArchivePlan plan = plan_of(entries, 64);
    Sharing sharing = this->sharing(true);
    {
      const Hook hook(call, [&](int) { return EIO; });
      EXPECT_THROW(write(plan, sharing, options, records), IoError) << call;
    }
    EXPECT_FALSE(sharing.hashed());
    EXPECT_EQ(read_file(path_), "old");
    EXPECT_EQ(folder_.names(), (std::set<std::string>{"base.pt", "new.pt"}));
  }
}

}  // namespace
}  // namespace ptsave
