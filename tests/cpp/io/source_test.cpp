// Readers of one file that learn of each other, and threads that take turns at the disk.
#include "core/io/source.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/scratch.h"
#include "core/io/file.h"
#include "core/memory/buffer.h"
#include "core/memory/pages.h"

namespace ptsave {
namespace {

using namespace common;

constexpr std::uint64_t kStart = SharedStart::kNbytes;

class CoReadersOfAFile : public testing::Test {
 protected:
  CoReadersOfAFile() : path_(folder_ / "model.pt") { write_file(path_, "bytes"); }

  File open() const { return File::open_for_reading(path_); }

  Folder folder_;
  std::string path_;
};

// One of them, past its start.
struct Reader {
  explicit Reader(File opened) : file(std::move(opened)) {
    EXPECT_FALSE(others.absent(file, kStart)) << "the start goes through the page cache";
  }
  bool alone() { return others.absent(file, 1); }

  File file;
  CoReaders others{std::make_shared<SharedStart>()};
};

TEST_F(CoReadersOfAFile, AreAbsentForTheOnlyOne) {
  Reader reader(open());
  EXPECT_TRUE(reader.alone());
  EXPECT_TRUE(reader.alone());
}

TEST_F(CoReadersOfAFile, AreNoticedWhenTheyComeAndWhenTheyGo) {
  Reader first(open());
  {
    Reader second(open());
    EXPECT_FALSE(first.alone());
    EXPECT_FALSE(second.alone());
    const Reader third(open());
    EXPECT_FALSE(first.alone());
  }
  EXPECT_TRUE(first.alone());
}

TEST_F(CoReadersOfAFile, AreNotThoseOfAnotherFileNorThoseThatOnlyHaveItOpen) {
  const std::string path = folder_ / "other.pt";
  write_file(path, "bytes");
  Reader reader(open());
  const Reader other(File::open_for_reading(path));
  const File opened = open();
  EXPECT_TRUE(reader.alone());
}

TEST_F(CoReadersOfAFile, AreNoticedThroughAHardLink) {
  const std::string path = folder_ / "link.pt";
  ASSERT_EQ(::link(path_.c_str(), path.c_str()), 0);
  Reader reader(open());
  const Reader other(File::open_for_reading(path));
  EXPECT_FALSE(reader.alone());
}

TEST_F(CoReadersOfAFile, InAnotherProcessAreForgottenWhenItIsKilled) {
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Reader reader(open());
    if (::write(ready[1], "!", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  Reader reader(open());
  EXPECT_FALSE(reader.alone());
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(reader.alone());
  ::close(ready[0]);
  ::close(ready[1]);
}

// A lock of somebody else's on the whole file, as lockf(3) takes it.
TEST_F(CoReadersOfAFile, MayBeOthersWithLocksOfTheirOwn) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const int fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0 || ::lockf(fd, F_LOCK, 0) != 0) ::_exit(1);
    for (;;) ::pause();
  }
  // The child holds its lock when the byte cannot be had.
  std::optional<Reader> reader;
  do {
    reader.reset();
    reader.emplace(open());
  } while (reader->alone() && ::waitpid(child, nullptr, WNOHANG) == 0);
  EXPECT_FALSE(reader->alone()) << "not told apart from a reader; nobody waits for it either";
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST_F(CoReadersOfAFile, AreFoundBeforeTheStartIsOver) {
  const Reader other(open());
  const File file = open();
  CoReaders readers(std::make_shared<SharedStart>());
  EXPECT_FALSE(readers.absent(file, 1));
  EXPECT_TRUE(readers.found());
}

TEST_F(CoReadersOfAFile, AreNotWhatAnInPlaceSaveWaitsFor) {
  Reader reader(open());
  InPlaceFile target(path_, path_, [] { FAIL() << "it waits"; });
  EXPECT_TRUE(reader.alone());
  target.clear(0);
  target.commit(/*durable=*/false);
}

class ColdSource : public CoReadersOfAFile {
 protected:
  static constexpr std::size_t kNbytes = kStart + kHugePageNbytes;

  ColdSource() {
    write_file(path_, noise(kNbytes, 0));
    drop_from_page_cache(path_);
  }

  static bool reads_direct(const ByteSource& source) {
    const Mapping memory(kNbytes);
    EXPECT_FALSE(source.read_direct(0, memory.data(), kStart));
    return source.read_direct(kStart, memory.data(), kHugePageNbytes);
  }
};

TEST_F(ColdSource, IsReadPastThePageCacheByItsOnlyReader) {
  const ByteSource source(open(), 0);
  EXPECT_EQ(reads_direct(source), open().direct_io_alignment().supported());
}

TEST_F(ColdSource, OfALoadOfSeveralFilesHasOneStartWithThem) {
  const auto start = std::make_shared<SharedStart>();
  const ByteSource first(open(), 0, DirectReads::kAlone, start);
  const Mapping memory(kNbytes);
  EXPECT_FALSE(first.read_direct(0, memory.data(), kStart));
  write_file(folder_ / "other.pt", noise(kHugePageNbytes, 1));
  const ByteSource third(File::open_for_reading(folder_ / "other.pt"), 0, DirectReads::kAlone,
                         start);
  EXPECT_EQ(third.read_direct(0, memory.data(), kHugePageNbytes),
            open().direct_io_alignment().supported());
}

TEST_F(ColdSource, IsAnnouncedBeforeItsFirstRead) {
  const ByteSource source(open(), 0);
  const ByteSource other(open(), 0);
  other.announce();
  EXPECT_FALSE(reads_direct(source));
}

TEST_F(ColdSource, IsReadThroughThePageCacheWhileOthersReadIt) {
  const ByteSource source(open(), 0);
  const ByteSource other(open(), 0);
  reads_direct(other);
  EXPECT_FALSE(reads_direct(source));
}

TEST_F(ColdSource, IsReadPastThePageCacheFromTheStartWhereThatIsAskedFor) {
  const ByteSource source(open(), 0, DirectReads::kAlways);
  const ByteSource other(open(), 0);
  reads_direct(other);
  const Mapping memory(kHugePageNbytes);
  EXPECT_EQ(source.read_direct(0, memory.data(), kHugePageNbytes),
            open().direct_io_alignment().supported());
}

TEST_F(ColdSource, IsReadThroughThePageCacheWhereThatIsAskedFor) {
  const ByteSource source(open(), 0, DirectReads::kNever);
  EXPECT_FALSE(reads_direct(source));
}

class FetchedAhead : public ColdSource, public testing::WithParamInterface<DirectReads> {};

TEST_P(FetchedAhead, BytesAreInThePageCacheOnceTheyWereRead) {
  constexpr int kMaxTries = 10;  // some kernels take pages away that nobody has used for a moment
  const ByteSource source(open(), 0, GetParam());
  const std::uint64_t nbytes = std::uint64_t{4} << 20;
  bool is_cached = false;
  for (int i = 0; i < kMaxTries && !is_cached; ++i) {
    source.read_ahead(0, nbytes);
    std::string bytes(nbytes, '\0');
    source.read_at(0, bytes.data(), bytes.size());
    ASSERT_EQ(bytes, noise(kNbytes, 0).substr(0, nbytes));
    is_cached = open().is_cached(0, nbytes);
  }
  EXPECT_TRUE(is_cached);
}

INSTANTIATE_TEST_SUITE_P(Ways, FetchedAhead,
                         testing::Values(DirectReads::kAlone, DirectReads::kNever));

// Has the process find huge pages cheap, or not.
void make_huge_pages(bool cheap) {
  const auto kind = cheap ? PageKind::kHuge : PageKind::kSmall;
  FreshPages& pages = FreshPages::of_process();
  for (int i = 0; pages.better() != kind && i < 1000; ++i) {
    pages.took(PageKind::kHuge, std::chrono::seconds{cheap ? 0 : 1}, FreshPages::Time{0});
  }
}

TEST_F(ColdSource, IsFetchedBySmallPiecesWhereLargeBlocksOfMemoryAreSlow) {
  const ByteSource source(open(), 0, DirectReads::kNever);
  const auto is_mapped = [&] {
    return read_file("/proc/self/maps").find(path_) != std::string::npos;
  };
  make_huge_pages(false);
  source.read_ahead(0, kHugePageNbytes);
  EXPECT_FALSE(is_mapped());
  make_huge_pages(true);
  source.read_ahead(0, kHugePageNbytes);
  EXPECT_TRUE(is_mapped());
}

TEST_F(ColdSource, IsFetchedByLargePiecesWhereOthersReadIt) {
  const ByteSource source(open(), 0, DirectReads::kNever);
  make_huge_pages(true);
  source.read_ahead(kHugePageNbytes / 2, kHugePageNbytes);
  EXPECT_TRUE(open().is_cached(kHugePageNbytes / 2, kHugePageNbytes)) << "it waits for them";
}

TEST_F(ColdSource, EndsWhereTheFileHasBeenCut) {
  PageCacheFiller filler;
  const File file = open();
  EXPECT_TRUE(filler.fill(file, kHugePageNbytes, 1));
  EXPECT_TRUE(file.is_cached(kHugePageNbytes, 1));
  EXPECT_TRUE(filler.fill(file, kNbytes - 1, kHugePageNbytes)) << "up to the end";
  EXPECT_FALSE(filler.fill(file, kNbytes, 1));
  std::filesystem::resize_file(path_, 0);
  EXPECT_FALSE(filler.fill(file, kHugePageNbytes, kHugePageNbytes));
}

TEST(PageCacheFillerOfAFile, CannotMapAnEmptyOne) {
  const Folder folder;
  write_file(folder / "empty.pt", "");
  PageCacheFiller filler;
  EXPECT_FALSE(filler.fill(File::open_for_reading(folder / "empty.pt"), 0, 1));
}

// The most threads that had a slot at a time, of `n_threads` that take one again and again.
int most_at_once(std::size_t n_threads) {
  ReadSlots slots(n_threads);
  std::atomic<int> now{0};
  std::atomic<int> most{0};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < n_threads; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 200; ++k) {
        const std::lock_guard slot(slots);
        const int mine = ++now;
        for (int seen = most.load(); mine > seen && !most.compare_exchange_weak(seen, mine);) {
        }
        std::this_thread::yield();
        --now;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return most;
}

TEST(ReadSlots, HalfOfTheThreadsAtATime) {
  for (const std::size_t n_threads : {2u, 5u, 12u}) {
    EXPECT_LE(most_at_once(n_threads), static_cast<int>(n_threads / 2));
  }
}

TEST(ReadSlots, AtLeastOne) {
  for (const std::size_t n_threads : {0u, 1u}) {
    ReadSlots slots(n_threads);
    for (int i = 0; i < 3; ++i) const std::lock_guard slot(slots);
  }
  EXPECT_EQ(most_at_once(1), 1);
}

}  // namespace

}  // namespace ptsave
