// Blocks of replaced and removed files, which are freed while nobody waits.
#include "core/io/late_release.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/scratch.h"
#include "core/base/error.h"
#include "core/io/file.h"

namespace ptsave {
namespace {

using namespace common;

constexpr std::size_t kLargeNbytes = std::size_t{16} << 20;

class ReplacedFile : public testing::Test {
 protected:
  ReplacedFile() : path_(folder_ / "model.pt"), directory_(::open(folder_.path().c_str(), O_PATH)) {
    write_file(path_, std::string(kLargeNbytes, 'x'));
  }
  ~ReplacedFile() override { finish_releases(); }

  Descriptor hold() const { return hold_blocks(directory_.get(), "model.pt"); }

  Folder folder_;
  std::string path_;
  Descriptor directory_;
};

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

// A file of the fixture's size over the one at `path`.
void replace(const std::string& path) {
  AtomicFile file(path, path);
  file.file().write_at(0, std::string(kLargeNbytes, 'y').data(), kLargeNbytes);
  file.commit(false);
}

// The sanitizers of gcc 12 do not take all of their own locks at fork: a thread that is ending may
// hold one, and a child that starts a thread then waits for it for ever.
void wait_for_ending_threads() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#ifdef __SANITIZE_THREAD__
  constexpr int kOwnThreads = 2;  // the sanitizer has one
#else
  constexpr int kOwnThreads = 1;
#endif
  namespace fs = std::filesystem;
  const auto n_threads = [] {
    return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
  };
  while (n_threads() > kOwnThreads) std::this_thread::yield();
#endif
}

TEST_F(ReplacedFile, IsLetGoOfInTheEnd) {
  Descriptor held = hold();
  ASSERT_TRUE(held);
  const int fd = held.get();
  std::filesystem::remove(path_);
  release_later(std::move(held));
  finish_releases();
  EXPECT_FALSE(is_open(fd));
}

TEST_F(ReplacedFile, IsHeldOnlyIfItIsTheBlocksLastName) {
  std::filesystem::create_hard_link(path_, folder_ / "other.pt");
  EXPECT_FALSE(hold());
}

TEST_F(ReplacedFile, IsHeldOnlyIfItHasManyBlocks) {
  write_file(path_, "few");
  EXPECT_FALSE(hold());
  std::filesystem::resize_file(path_, kLargeNbytes);  // a hole
  EXPECT_FALSE(hold());
}

TEST_F(ReplacedFile, IsNeitherALinkNorADirectory) {
  std::filesystem::create_symlink(path_, folder_ / "link");
  std::filesystem::create_directory(folder_ / "directory");
  EXPECT_FALSE(hold_blocks(directory_.get(), "link"));
  EXPECT_FALSE(hold_blocks(directory_.get(), "directory"));
  EXPECT_FALSE(hold_blocks(directory_.get(), "missing"));
}

TEST_F(ReplacedFile, IsNotHeldByAChild) {
  for (int i = 0; i < 20; ++i) {
    replace(path_);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(static_cast<int>(n_removed_files_open()));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0) << "files that the child holds";
  }
}

TEST_F(ReplacedFile, IsLetGoOfByAChildsOwnThread) {
  for (int i = 0; i < 50; ++i) {
    replace(path_);
    finish_releases();  // and the thread is about to end
    wait_for_ending_threads();
    ASSERT_EQ(in_child([&] {
                replace(path_);
                finish_releases();
                EXPECT_EQ(n_removed_files_open(), 0U);
              }),
              0);
  }
}

TEST_F(ReplacedFile, IsLetGoOfByWhicheverThreadReplacesIt) {
  const auto replace_often = [&](const std::string& path) {
    for (int i = 0; i < 5; ++i) replace(path);
  };
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (const char* name : {"model.pt", "model.pt", "a.pt", "b.pt"}) {
    threads.emplace_back(replace_often, folder_ / name);
  }
  // Children end at once: they see no more than they have to.
  for (int i = 0; i < 5; ++i) EXPECT_EQ(in_child([] { finish_releases(); }), 0);
  for (std::thread& thread : threads) thread.join();
  finish_releases();
  EXPECT_EQ(n_removed_files_open(), 0U);
  EXPECT_EQ(folder_.names(), (std::set<std::string>{"a.pt", "b.pt", "model.pt"}));
}

// Rarely goes wrong where a thread makes what the child of another thread waits for.
TEST_F(ReplacedFile, IsAwaitedByAChildOfAProcessThatHasJustBegun) {
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(in_child([] {
                std::thread first(finish_releases);
                EXPECT_EQ(in_child([] { finish_releases(); }), 0);
                first.join();
              }),
              0);
  }
}

TEST_F(ReplacedFile, IsLetGoOfByWhicheverProcessReplacesIt) {
  std::vector<pid_t> children;
  for (const char* name : {"model.pt", "model.pt", "other.pt"}) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    for (int i = 0; i < 5; ++i) replace(folder_ / name);
    finish_releases();
    std::_Exit(static_cast<int>(n_removed_files_open()));
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(folder_.names(), (std::set<std::string>{"model.pt", "other.pt"}));
}

TEST_F(ReplacedFile, DoesNotQueueUpWithoutBound) {
  for (int i = 0; i < 12; ++i) {
    replace(path_);
    EXPECT_LE(n_removed_files_open(), 4U);
  }
  finish_releases();
  EXPECT_EQ(n_removed_files_open(), 0U);
}

TEST_F(ReplacedFile, CanBeRemoved) {
  EXPECT_TRUE(remove_file(path_));
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_FALSE(remove_file(path_));
  EXPECT_THROW(remove_file(folder_.path()), IoError);
}

}  // namespace
}  // namespace ptsave
