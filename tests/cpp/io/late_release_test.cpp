// Blocks of replaced and removed files, which are freed while nobody waits.
#include "core/io/late_release.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "common/scratch.h"
#include "core/base/error.h"
#include "core/io/file.h"

namespace ptsave {
namespace {

using scratch::n_removed_files_open;

constexpr std::size_t kLargeNbytes = std::size_t{16} << 20;

class ReplacedFile : public testing::Test {
 protected:
  ReplacedFile() : path_(folder_ / "model.pt"), directory_(::open(folder_.path().c_str(), O_PATH)) {
    scratch::write_file(path_, std::string(kLargeNbytes, 'x'));
  }
  ~ReplacedFile() override { finish_releases(); }

  Descriptor hold() const { return hold_blocks(directory_.get(), "model.pt"); }

  scratch::Folder folder_;
  std::string path_;
  Descriptor directory_;
};

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

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
  scratch::write_file(path_, "few");
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
    AtomicFile file(path_, path_);
    file.file().write_at(0, std::string(kLargeNbytes, 'y').data(), kLargeNbytes);
    file.commit(false);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(static_cast<int>(n_removed_files_open()));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0) << "files that the child holds";
  }
}

TEST_F(ReplacedFile, DoesNotQueueUpWithoutBound) {
  for (int i = 0; i < 12; ++i) {
    AtomicFile file(path_, path_);
    file.file().write_at(0, std::string(kLargeNbytes, 'y').data(), kLargeNbytes);
    file.commit(false);
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
