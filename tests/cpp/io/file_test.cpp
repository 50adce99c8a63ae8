#include "core/io/file.h"

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/scratch.h"
#include "core/base/error.h"
#include "core/memory/buffer.h"

namespace ptsave {
namespace {

using namespace common;

using Names = std::set<std::string>;

constexpr uid_t kNobody = 65534;

// The errno of the IoError that `call` throws; fails the test if it does not name `path`.
int errno_of(const std::function<void()>& call, const std::string& path) {
  try {
    call();
  } catch (const IoError& error) {
    EXPECT_EQ(error.path(), path);
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos);
    return error.errnum();
  }
  return 0;
}

// Another user for as long as it lives; only root can become one.
class AsUser {
 public:
  explicit AsUser(uid_t uid) { EXPECT_EQ(::seteuid(uid), 0); }
  AsUser(const AsUser&) = delete;
  AsUser& operator=(const AsUser&) = delete;
  ~AsUser() { EXPECT_EQ(::seteuid(0), 0); }
};

class Umask {
 public:
  explicit Umask(mode_t mask) : old_(::umask(mask)) {}
  Umask(const Umask&) = delete;
  Umask& operator=(const Umask&) = delete;
  ~Umask() { ::umask(old_); }

 private:
  mode_t old_;
};

void save(const std::string& path, const std::string& bytes, bool durable = false) {
  AtomicFile target(path, path);
  target.file().write_at(0, bytes.data(), bytes.size());
  target.commit(durable);
}

bool is_temporary_of(const std::string& entry, const std::string& name) {
  const std::string prefix = "." + name + ".";
  return entry.size() == prefix.size() + 16 + 7 && entry.starts_with(prefix) &&
         entry.ends_with(".ptsave");
}

// The name of the one temporary file in `folder`.
std::string temporary_in(const Folder& folder) {
  for (const std::string& name : folder.names()) {
    if (name.starts_with('.') && name.ends_with(".ptsave")) return name;
  }
  ADD_FAILURE() << "no temporary file";
  return {};
}

class InFolder : public testing::Test {
 protected:
  const Folder folder_;
  const std::string path_ = folder_ / "model.pt";
};

class FileTest : public InFolder {};
class InPlaceFileTest : public InFolder {};
class RemoveLeftovers : public InFolder {};
class ResolveLinks : public InFolder {};

// -------------------------------------------------------------------------------------- Descriptor

TEST(Descriptor, ClosesWhatItOwnsOnce) {
  const std::size_t before = n_descriptors();
  {
    Descriptor first(::dup(0));
    const int fd = first.get();
    EXPECT_TRUE(first);
    Descriptor second(std::move(first));
    EXPECT_EQ(second.get(), fd);
    Descriptor third(::dup(0));
    third = std::move(second);  // closes its own
    EXPECT_EQ(third.get(), fd);
    EXPECT_EQ(n_descriptors(), before + 1);
    const int released = third.release();
    EXPECT_FALSE(third);
    EXPECT_EQ(::close(released), 0);
    third.reset();
  }
  EXPECT_EQ(n_descriptors(), before);
}

// -------------------------------------------------------------------------------------------- File

TEST_F(FileTest, ReadsAndWritesAtAnyPosition) {
  const std::string path = folder_ / "file";
  const File file = File::open_for_writing(path);
  file.write_at(10, "hello", 5);
  EXPECT_EQ(file.nbytes(), 15u);
  EXPECT_EQ(read_file(path), std::string(10, '\0') + "hello");
  std::string text(4, 'x');
  file.read_at(11, text.data(), 4);
  EXPECT_EQ(text, "ello");
  file.truncate(12);
  EXPECT_EQ(file.nbytes(), 12u);
  file.sync();
}

TEST_F(FileTest, OpensForWritingWithoutLosingWhatIsThere) {
  write_file(folder_ / "file", "abcdef");
  File::open_for_writing(folder_ / "file").write_at(2, "XY", 2);
  EXPECT_EQ(read_file(folder_ / "file"), "abXYef");
}

TEST_F(FileTest, CreatesWithTheUmask) {
  const Umask umask(027);
  static_cast<void>(File::open_for_writing(folder_ / "file"));
  EXPECT_EQ(mode_of(folder_ / "file"), 0640u);
}

TEST_F(FileTest, ReadingPastTheEndIsAnErrorOfItsOwn) {
  write_file(folder_ / "file", "abcdef");
  const File file = File::open_for_reading(folder_ / "file");
  std::array<char, 10> bytes{};
  try {
    file.read_at(2, bytes.data(), 5);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.errnum(), 0);
    EXPECT_EQ(error.operation(), "pread (unexpected end of file)");
    EXPECT_EQ(error.path(), folder_ / "file");
  }
  file.read_at(6, bytes.data(), 0);  // nothing is always there
}

TEST_F(FileTest, ErrorsSayWhatFailedWhereAndWhy) {
  const std::string missing = folder_ / "missing/file";
  EXPECT_EQ(errno_of([&] { File::open_for_reading(missing); }, missing), ENOENT);
  EXPECT_EQ(errno_of([&] { File::open_for_writing(missing); }, missing), ENOENT);
  EXPECT_EQ(errno_of([&] { File::open_for_writing(folder_.path()); }, folder_.path()), EISDIR);
  EXPECT_EQ(errno_of([&] { File::duplicate(-1, "name"); }, "name"), EBADF);
  write_file(folder_ / "file", "abc");
  const File read_only = File::open_for_reading(folder_ / "file");
  EXPECT_EQ(errno_of([&] { read_only.write_at(0, "x", 1); }, folder_ / "file"), EBADF);
  EXPECT_EQ(errno_of([&] { read_only.truncate(0); }, folder_ / "file"), EINVAL);
  EXPECT_EQ(read_file(folder_ / "file"), "abc");
}

TEST_F(FileTest, WritingToAFullDeviceIsEnospc) {
  const File full = File::open_for_writing("/dev/full");
  EXPECT_EQ(errno_of([&] { full.write_at(0, "x", 1); }, "/dev/full"), ENOSPC);
}

TEST_F(FileTest, ReopensWhatHasNoNameAnyMore) {
  write_file(folder_ / "file", "abcdef");
  const Descriptor fd(::open((folder_ / "file").c_str(), O_RDONLY | O_CLOEXEC));
  ::unlink((folder_ / "file").c_str());
  const File again = File::reopen_for_reading(fd.get(), "as named");
  EXPECT_NE(again.fd(), fd.get());
  EXPECT_EQ(again.path(), "as named");
  std::array<char, 3> bytes{};
  again.read_at(3, bytes.data(), 3);
  EXPECT_EQ(std::string(bytes.data(), 3), "def");
  EXPECT_EQ(::lseek(fd.get(), 0, SEEK_CUR), 0);
}

TEST_F(FileTest, ReadsWhatMayNotBeOpenedAgain) {
  if (::geteuid() != 0) return;
  write_file(folder_ / "file", "abcdef");
  ::chmod((folder_ / "file").c_str(), 0600);
  const Descriptor fd(::open((folder_ / "file").c_str(), O_RDONLY | O_CLOEXEC));
  const AsUser nobody(kNobody);
  std::array<char, 3> bytes{};
  File::reopen_for_reading(fd.get(), "name").read_at(3, bytes.data(), 3);
  EXPECT_EQ(std::string(bytes.data(), 3), "def");
}

TEST_F(FileTest, DuplicatesShareTheFileAndOutliveTheOriginal) {
  Descriptor fd(::open((folder_ / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const File file = File::duplicate(fd.get(), "name");
  EXPECT_NE(::fcntl(file.fd(), F_GETFD) & FD_CLOEXEC, 0);
  fd.reset();
  file.write_at(0, "abc", 3);
  EXPECT_EQ(read_file(folder_ / "file"), "abc");
}

TEST_F(FileTest, PreallocatesWithoutWriting) {
  const File file = File::open_for_writing(folder_ / "file");
  file.preallocate(1 << 20);
  struct stat status{};
  ASSERT_EQ(::fstat(file.fd(), &status), 0);
  EXPECT_GE(status.st_blocks * 512, 1 << 20);
  EXPECT_EQ(errno_of([&] { file.preallocate(std::uint64_t{1} << 50); }, folder_ / "file"), EFBIG);
}

TEST_F(FileTest, DirectIoWorksWhereItIsPromised) {
  constexpr std::size_t kBlock = DirectIoAlignment::kMinBlockNbytes;
  const std::string content = noise(3 * kBlock + 17, 1);
  write_file(folder_ / "file", content);
  File file = File::open_for_writing(folder_ / "file");
  const DirectIoAlignment alignment = file.direct_io_alignment();
  const Descriptor direct = file.open_direct_reader();
  EXPECT_EQ(static_cast<bool>(direct), alignment.supported());
  if (!alignment.supported()) return;
  ASSERT_EQ(alignment.block_nbytes(), kBlock);
  const Mapping memory(4 * kBlock);
  EXPECT_EQ(::pread(direct.get(), memory.data(), memory.nbytes(), 0),
            static_cast<ssize_t>(content.size()));
  EXPECT_EQ(std::string(reinterpret_cast<char*>(memory.data()), content.size()), content);
  const File writer(file.open_direct_writer(), folder_ / "file");
  EXPECT_NE(::fcntl(writer.fd(), F_GETFL) & O_DIRECT, 0);
  EXPECT_EQ(errno_of([&] { writer.write_at(1, memory.data() + 1, 100); }, folder_ / "file"),
            EINVAL);
  writer.write_at(kBlock, memory.data(), kBlock);
  file.write_at(1, "x", 1);
  EXPECT_EQ(read_file(folder_ / "file").substr(kBlock, kBlock), content.substr(0, kBlock));
}

TEST_F(FileTest, DirectIoIsRefusedWhereThereIsNone) {
  const File pipe(Descriptor(::open("/dev/zero", O_RDWR | O_CLOEXEC)), "/dev/zero");
  EXPECT_FALSE(pipe.direct_io_alignment().supported());
  EXPECT_FALSE(pipe.open_direct_reader());
  EXPECT_FALSE(pipe.open_direct_writer());
}

TEST_F(FileTest, TransfersAreSafeForConcurrentUse) {
  const std::string content = noise(1 << 20, 2);
  const File file = File::open_for_writing(folder_ / "file");
  std::vector<std::thread> threads;
  threads.reserve(4);
  constexpr std::size_t kPiece = 1 << 16;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::string read(kPiece, '\0');
      for (std::size_t at = t * kPiece; at < content.size(); at += 4 * kPiece) {
        file.write_at(at, content.data() + at, kPiece);
        file.read_at(at, read.data(), kPiece);
        EXPECT_EQ(read, content.substr(at, kPiece));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(read_file(folder_ / "file"), content);
}

// ---------------------------------------------------------------------------- AtomicFile: the file

class AtomicFileTest : public InFolder {};
class AtomicFileDurability : public InFolder, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Durable, AtomicFileDurability, testing::Bool());

TEST_P(AtomicFileDurability, AppearsWholeOnCommit) {
  write_file(path_, "old");
  AtomicFile target(path_, path_);
  target.file().write_at(0, "new contents", 12);
  EXPECT_EQ(read_file(path_), "old");
  target.commit(GetParam());
  EXPECT_EQ(read_file(path_), "new contents");
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
}

TEST_P(AtomicFileDurability, CreatesWhatWasNotThere) {
  save(path_, "new", GetParam());
  EXPECT_EQ(read_file(path_), "new");
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
}

TEST_F(AtomicFileTest, IsDiscardedByItsDestructor) {
  const std::size_t descriptors = n_descriptors();
  write_file(path_, "old");
  {
    AtomicFile target(path_, "display");
    target.file().write_at(0, "new", 3);
    EXPECT_TRUE(is_temporary_of(temporary_in(folder_), "model.pt"));
  }
  EXPECT_EQ(read_file(path_), "old");
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
  EXPECT_EQ(n_descriptors(), descriptors);
}

TEST_F(AtomicFileTest, LeavesNoDescriptorAfterCommit) {
  const std::size_t descriptors = n_descriptors();
  for (int i = 0; i < 20; ++i) save(path_, "new", i % 2 == 0);
  EXPECT_EQ(n_descriptors(), descriptors);
}

TEST_F(AtomicFileTest, ShowsTheNameItWasGiven) {
  const std::string path = folder_ / "missing/model.pt";
  EXPECT_EQ(errno_of([&] { AtomicFile(path, "as the user wrote it"); }, "as the user wrote it"),
            ENOENT);
  write_file(folder_ / "file", "");
  EXPECT_EQ(errno_of([&] { AtomicFile(folder_ / "file/model.pt", "x"); }, "x"), ENOTDIR);
  AtomicFile target(path_, "shown");
  EXPECT_EQ(target.file().path(), "shown");
}

TEST_F(AtomicFileTest, FailsToReplaceADirectory) {
  std::filesystem::create_directory(path_);
  EXPECT_EQ(errno_of([&] { save(path_, "new"); }, path_), EISDIR);
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
}

TEST_F(AtomicFileTest, TakesRelativePathsAndTheRoot) {
  const std::string here = std::filesystem::current_path();
  std::filesystem::current_path(folder_.path());
  {
    AtomicFile target("model.pt", "model.pt");
    target.file().write_at(0, "new", 3);
    std::filesystem::current_path(here);  // the directory was opened, not remembered by name
    target.commit(true);
  }
  EXPECT_EQ(read_file(path_), "new");
  const std::string in_root = "/ptsave-test-" + std::to_string(::getpid());
  save(in_root, "root");
  EXPECT_EQ(read_file(in_root), "root");
  ::unlink(in_root.c_str());
}

// ---------------------------------------------------------------------- AtomicFile: mode and owner

TEST_F(AtomicFileTest, KeepsTheModeOfWhatItReplaces) {
  const Umask umask(077);
  for (const mode_t mode : {0600u, 0644u, 0664u, 0666u, 0640u, 0755u, 0200u, 01644u}) {
    write_file(path_, "old");
    ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
    save(path_, "new");
    EXPECT_EQ(mode_of(path_), mode);
  }
}

TEST_F(AtomicFileTest, TakesTheUmaskForANewFile) {
  for (const mode_t mask : {0022u, 0002u, 0077u, 0000u}) {
    const Umask umask(mask);
    save(path_, "new");
    EXPECT_EQ(mode_of(path_), 0666u & ~mask);
    ::unlink(path_.c_str());
  }
}

TEST_F(AtomicFileTest, IsNeverMoreReadableThanWhatItReplaces) {
  const Umask umask(0);
  write_file(folder_ / "secret.pt", "old");
  ::chmod((folder_ / "secret.pt").c_str(), 0600);
  const AtomicFile target(folder_ / "secret.pt", "");
  EXPECT_EQ(mode_of(folder_ / temporary_in(folder_)), 0600u);
}

TEST_F(AtomicFileTest, KeepsTheOwnerWherePermitted) {
  if (::geteuid() != 0) return;  // only root may give files away
  write_file(path_, "old");
  ASSERT_EQ(::chown(path_.c_str(), 1234, 5678), 0);
  ::chmod(path_.c_str(), 0640);
  save(path_, "new");
  struct stat status{};
  ASSERT_EQ(::stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_uid, 1234u);
  EXPECT_EQ(status.st_gid, 5678u);
  EXPECT_EQ(mode_of(path_), 0640u);
}

TEST_F(AtomicFileTest, SavesWhereTheOwnerCannotBeKept) {
  if (::geteuid() != 0) return;
  ::chmod(folder_.path().c_str(), 0777);
  write_file(path_, "old");
  ::chmod(path_.c_str(), 0666);
  const AsUser nobody(kNobody);
  save(path_, "new");
  EXPECT_EQ(read_file(path_), "new");
  EXPECT_EQ(mode_of(path_), 0666u);
}

TEST_F(AtomicFileTest, KeepsTheGroupOfASharedFolder) {
  if (::geteuid() != 0) return;
  constexpr gid_t kTeam = 4242;
  ::chmod(folder_.path().c_str(), 0777);
  write_file(path_, "old");
  ASSERT_EQ(::chown(path_.c_str(), 1234, kTeam), 0);
  ::chmod(path_.c_str(), 0660);
  const pid_t member = ::fork();
  if (member == 0) {  // a member of the team, but not its owner
    const bool ready =
        ::setgroups(1, &kTeam) == 0 && ::setgid(kNobody) == 0 && ::setuid(kNobody) == 0;
    if (ready) save(path_, "new");
    ::_exit(ready ? 0 : 1);
  }
  int result = 0;
  ASSERT_EQ(::waitpid(member, &result, 0), member);
  EXPECT_EQ(result, 0);
  struct stat status{};
  ASSERT_EQ(::stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_gid, kTeam) << "the rest of the team has lost the file";
  EXPECT_EQ(read_file(path_), "new");
}

TEST_F(AtomicFileTest, NeedsTheDirectoryToBeWritable) {
  if (::geteuid() != 0) return;
  write_file(path_, "old");
  ::chmod(path_.c_str(), 0666);
  ::chmod(folder_.path().c_str(), 0555);
  const AsUser nobody(kNobody);
  EXPECT_EQ(errno_of([&] { AtomicFile(path_, "x"); }, "x"), EACCES);
}

TEST_P(AtomicFileDurability, NeedsTheDirectoryOnlyToBeWritable) {
  if (::geteuid() != 0) return;
  ::chmod(folder_.path().c_str(), 0333);  // may not be listed
  {
    const AsUser nobody(kNobody);
    save(path_, "new", GetParam());
  }
  EXPECT_EQ(read_file(path_), "new");
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
}

// --------------------------------------------------------------------------- AtomicFile: leftovers

constexpr const char* kToken = "0123456789abcdef";

std::string leftover(const std::string& name) { return "." + name + "." + kToken + ".ptsave"; }

TEST_F(AtomicFileTest, RemovesWhatDeadWritersLeft) {
  write_file(folder_ / leftover("model.pt"), "half");
  write_file(folder_ / ".model.pt.fedcba9876543210.ptsave", "half");
  save(path_, "new");
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
}

TEST_F(AtomicFileTest, RemovesLeftoversEvenIfItIsDiscarded) {
  write_file(folder_ / leftover("model.pt"), "half");
  {
    const AtomicFile target(path_, "");
  }
  EXPECT_EQ(folder_.names(), Names{});
}

TEST_F(AtomicFileTest, KeepsFilesThatOnlyLookAlike) {
  const Names others{
      leftover("other.pt"),                           // another target's
      leftover("model.pt2"),                          //
      leftover("model"),                              //
      "model.pt." + std::string(kToken) + ".ptsave",  // no dot in front
      ".model.pt.0123456789abcde.ptsave",             // 15 digits
      ".model.pt.0123456789abcdef0.ptsave",           // 17
      ".model.pt.0123456789ABCDEF.ptsave",            // not as written here
      ".model.pt.0123456789abcdeg.ptsave",            // no hex digit
      ".model.pt.0123456789abcdef.ptsave~",           //
      ".model.pt.0123456789abcdef.tmp",               //
      ".model.pt..ptsave",                            //
      ".model.pt.0123456789abcdef",                   //
  };
  for (const std::string& name : others) write_file(folder_ / name, "mine");
  save(path_, "new");
  Names expected = others;
  expected.insert("model.pt");
  EXPECT_EQ(folder_.names(), expected);
}

TEST_F(AtomicFileTest, DoesNotConfuseTargetsWhoseNamesAreLeftovers) {
  // Someone's checkpoint may be called like a leftover of a shorter name's.
  const std::string odd = leftover("a");
  save(folder_ / odd, "odd");
  EXPECT_EQ(folder_.names(), Names{odd});
  save(folder_ / "b", "b");
  EXPECT_EQ(folder_.names(), (Names{odd, "b"}));
}

TEST_F(AtomicFileTest, KeepsWhatLiveWritersAreWriting) {
  AtomicFile first(path_, "");
  first.file().write_at(0, "first", 5);
  {
    AtomicFile second(path_, "");
    EXPECT_EQ(folder_.names().size(), 2u);
    second.file().write_at(0, "second", 6);
    second.commit(false);
  }
  EXPECT_EQ(read_file(path_), "second");
  first.commit(false);
  EXPECT_EQ(read_file(path_), "first");
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
}

TEST_F(AtomicFileTest, KeepsWhatAnotherProcessIsWriting) {
  std::array<int, 2> ready{};
  std::array<int, 2> go{};
  ASSERT_EQ(::pipe(ready.data()) | ::pipe(go.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile target(path_, "");
    char byte = 0;
    static_cast<void>(!::write(ready[1], "r", 1));
    static_cast<void>(!::read(go[0], &byte, 1));
    ::_exit(0);  // without the destructor, like a killed process
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const std::string theirs = temporary_in(folder_);
  save(path_, "new");
  EXPECT_EQ(folder_.names(), (Names{"model.pt", theirs}));
  ASSERT_EQ(::write(go[1], "g", 1), 1);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  save(path_, "newer");
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
  for (const int fd : {ready[0], ready[1], go[0], go[1]}) ::close(fd);
}

TEST_F(AtomicFileTest, TouchesNothingThatIsNoFile) {
  write_file(folder_ / "victim", "mine");
  // A hostile neighbour's link, pipe or folder_ under a leftover's name neither hangs nor misleads.
  std::filesystem::create_symlink(folder_ / "victim", folder_ / leftover("model.pt"));
  ASSERT_EQ(::mkfifo((folder_ / ".model.pt.0000000000000001.ptsave").c_str(), 0600), 0);
  std::filesystem::create_directory(folder_ / ".model.pt.0000000000000002.ptsave");
  save(path_, "new");
  EXPECT_EQ(read_file(folder_ / "victim"), "mine");
  EXPECT_EQ(read_file(path_), "new");
}

TEST_F(RemoveLeftovers, OfOneTargetWithoutWritingIt) {
  write_file(folder_ / leftover("model.pt"), "half");
  write_file(folder_ / leftover("other.pt"), "half");
  remove_leftovers(path_);
  EXPECT_EQ(folder_.names(), Names{leftover("other.pt")});
  EXPECT_EQ(errno_of([&] { remove_leftovers(folder_ / "no/model.pt"); }, folder_ / "no/model.pt"),
            ENOENT);
}

TEST_F(RemoveLeftovers, KeepsWhatIsBeingWritten) {
  AtomicFile target(path_, "");
  remove_leftovers(path_);
  target.commit(false);
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
}

TEST(TargetOfTemporary, IsTheNameThatWasExtended) {
  EXPECT_EQ(target_of_temporary(leftover("model.pt")), "model.pt");
  EXPECT_EQ(target_of_temporary(leftover("a")), "a");
  EXPECT_EQ(target_of_temporary(leftover(leftover("a"))), leftover("a"));
  for (const std::string& entry : std::vector<std::string>{
           "", ".", "model.pt", leftover("model.pt").substr(1), leftover("model.pt") + "x",
           ".0123456789abcdef.ptsave", "..0123456789abcdef.ptsave",
           ".model.pt.0123456789ABCDEF.ptsave", ".model.pt.123456789abcdef.ptsave",
           leftover(std::string(300, 'n'))}) {
    EXPECT_EQ(target_of_temporary(entry), "") << entry;
  }
}

TEST(TargetOfTemporary, FindsTheLeftoversOfAnyName) {
  for (const std::size_t nbytes : {1U, 229U, 230U, 231U, 255U}) {
    const Folder folder;
    std::string temporary;
    {
      const AtomicFile target(folder / std::string(nbytes, 'n'), "");
      temporary = temporary_in(folder);
    }
    write_file(folder / temporary, "half");
    remove_leftovers(folder / std::string(target_of_temporary(temporary)));
    EXPECT_EQ(folder.names(), Names{}) << nbytes;
  }
}

class LongNames : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Lengths, LongNames, testing::Values(1, 200, 229, 230, 231, 232, 254, 255));

TEST_P(LongNames, SaveAndCleanUp) {
  const Folder folder;
  const std::string name(GetParam(), 'n');
  const std::string path = folder / name;
  std::string temporary;
  {
    AtomicFile target(path, path);
    temporary = temporary_in(folder);
    EXPECT_LE(temporary.size(), 255u);
    target.file().write_at(0, "new", 3);
    target.commit(true);
  }
  EXPECT_EQ(folder.names(), Names{name});
  write_file(folder / temporary, "half");
  save(path, "newer");
  EXPECT_EQ(folder.names(), Names{name});
  if (name.size() < 2) return;
  // A name that differs only where the temporary name is cut has other leftovers.
  write_file(folder / temporary, "half");
  std::string other = name;
  other.back() = 'm';
  save(folder / other, "other");
  EXPECT_EQ(folder.names(), (Names{name, other, temporary}));
}

TEST_F(AtomicFileTest, RefusesNamesThatNoFileCanHave) {
  const std::string path = folder_ / std::string(256, 'n');
  EXPECT_EQ(errno_of([&] { save(path, "new"); }, path), ENAMETOOLONG);
  EXPECT_EQ(folder_.names(), Names{});
}

TEST_F(AtomicFileTest, ManyWritersOfOneTargetDoNotDisturbEachOther) {
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string bytes(1000, static_cast<char>('a' + t));
      for (int i = 0; i < 100; ++i) save(path_, bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string last = read_file(path_);
  EXPECT_EQ(last, std::string(1000, last.front()));
  EXPECT_EQ(folder_.names(), Names{"model.pt"});
}

TEST_F(AtomicFileTest, WorksOnTmpfs) {
  const Folder folder("/dev/shm");
  write_file(folder / leftover("model.pt"), "half");
  save(folder / "model.pt", "new", true);
  EXPECT_EQ(folder.names(), Names{"model.pt"});
}

// ------------------------------------------------------------------------------------- InPlaceFile

void overwrite(const std::string& path, const std::string& bytes) {
  InPlaceFile target(path, path, kNoPoll);
  target.clear(bytes.size());
  target.file().write_at(0, bytes.data(), bytes.size());
  target.commit(false);
}

TEST_F(InPlaceFileTest, KeepsInodeModeAndOtherNames) {
  write_file(path_, "an old file");
  ::chmod(path_.c_str(), 0640);
  ASSERT_EQ(::link(path_.c_str(), (folder_ / "other").c_str()), 0);
  overwrite(path_, "new");
  EXPECT_EQ(read_file(folder_ / "other"), "new");
  EXPECT_EQ(mode_of(path_), 0640u);
}

TEST_F(InPlaceFileTest, NeedsNoPermissionToRead) {
  if (::geteuid() != 0) return;
  write_file(path_, "old");
  ::chmod(path_.c_str(), 0222);
  {
    const AsUser nobody(kNobody);
    ::chmod(folder_.path().c_str(), 0755);
    EXPECT_EQ(errno_of([&] { File::open_for_reading(path_); }, path_), EACCES);
  }
  ::chmod(folder_.path().c_str(), 0755);
  const AsUser nobody(kNobody);
  overwrite(path_, "new");
}

TEST_F(InPlaceFileTest, RemovesOnlyWhatItHasCreated) {
  write_file(folder_ / "old.pt", "old");
  {
    InPlaceFile fresh(folder_ / "fresh.pt", "", kNoPoll);
    fresh.file().write_at(0, "half", 4);
    const InPlaceFile old(folder_ / "old.pt", "", kNoPoll);
    EXPECT_EQ(folder_.names(), (Names{"fresh.pt", "old.pt"}));
  }
  EXPECT_EQ(folder_.names(), Names{"old.pt"});
  EXPECT_EQ(read_file(folder_ / "old.pt"), "old");
}

TEST_F(InPlaceFileTest, LeavesAloneWhatHasTakenItsName) {
  {
    const InPlaceFile fresh(path_, "", kNoPoll);
    save(path_, "another one's");
  }
  EXPECT_EQ(read_file(path_), "another one's");
}

TEST_F(InPlaceFileTest, WaitsForTheOtherSave) {
  std::string last;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string bytes(1000 + static_cast<std::size_t>(t), static_cast<char>('a' + t));
      for (int i = 0; i < 20; ++i) overwrite(path_, bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  last = read_file(path_);
  const auto t = static_cast<std::size_t>(last.front() - 'a');
  EXPECT_EQ(last, std::string(1000 + t, last.front()));
}

TEST_F(InPlaceFileTest, CanBeInterruptedWhileItWaits) {
  const InPlaceFile first(path_, "", kNoPoll);
  int n_polls = 0;
  const auto interrupt = [&] {
    if (++n_polls == 3) throw IoError(EINTR, "poll", "");
  };
  EXPECT_THROW(InPlaceFile(path_, "", interrupt), IoError);
  EXPECT_EQ(folder_.names(), Names{"model.pt"}) << "it is the first one's";
}

TEST_F(InPlaceFileTest, FollowsAFileThatIsCreatedAnew) {
  auto failing = std::make_unique<InPlaceFile>(path_, "", kNoPoll);
  bool waited = false;
  const auto end_the_first = [&] {
    waited = true;
    failing.reset();  // removes the file that it has created, for which the second one waits
  };
  InPlaceFile second(path_, "", end_the_first);
  EXPECT_TRUE(waited);
  second.file().write_at(0, "new", 3);
  second.commit(false);
  EXPECT_EQ(read_file(path_), "new");
}

TEST_F(InPlaceFileTest, IsNotHeldUpByOtherLocksOrForks) {
  write_file(path_, "old");
  const Descriptor own(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(own.get(), LOCK_EX), 0);  // of a program with a protocol of its own
  pid_t child = 0;
  {
    InPlaceFile first(path_, "", kNoPoll);
    child = ::fork();
    if (child == 0) {
      ::pause();
      ::_exit(0);
    }
    first.clear(3);
    first.commit(false);
  }
  overwrite(path_, "new");  // the child has a copy of the first one's descriptor
  EXPECT_EQ(read_file(path_), "new");
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST_F(InPlaceFileTest, KeepsWhatTheDiskHasNoRoomToReplace) {
  write_file(path_, "old");
  InPlaceFile target(path_, "shown", kNoPoll);
  EXPECT_EQ(errno_of([&] { target.clear(std::uint64_t{1} << 60); }, path_), ENOSPC);
  EXPECT_EQ(read_file(path_), "old");
}

// ----------------------------------------------------------------------------------- resolve_links

TEST_F(ResolveLinks, FollowsTheLinksOfTheLastName) {
  std::filesystem::create_directory(folder_ / "below");
  ASSERT_EQ(::symlink("../b", (folder_ / "below/a").c_str()), 0);
  ASSERT_EQ(::symlink((folder_ / "c").c_str(), (folder_ / "b").c_str()), 0);
  EXPECT_EQ(resolve_links(folder_ / "below/a"), folder_ / "c");  // which is not there
  write_file(folder_ / "c", "");
  EXPECT_EQ(resolve_links(folder_ / "b"), folder_ / "c");
  EXPECT_EQ(resolve_links(folder_ / "c"), folder_ / "c");
  EXPECT_EQ(resolve_links("model.pt"), "model.pt");
  ASSERT_EQ(::symlink("loop", (folder_ / "loop").c_str()), 0);
  EXPECT_EQ(errno_of([&] { resolve_links(folder_ / "loop"); }, folder_ / "loop"), ELOOP);
}

TEST_F(ResolveLinks, KnowsLinksToOpenFiles) {
  write_file(folder_ / "file", "");
  const Descriptor file(::open((folder_ / "file").c_str(), O_RDONLY | O_CLOEXEC));
  const Descriptor directory(::open(folder_.path().c_str(), O_RDONLY | O_CLOEXEC));
  const std::string number = std::to_string(file.get());
  EXPECT_EQ(resolve_links("/proc/self/fd/" + number), std::nullopt);
  ASSERT_EQ(::symlink(("/proc/self/fd/" + number).c_str(), (folder_ / "link").c_str()), 0);
  EXPECT_EQ(resolve_links(folder_ / "link"), std::nullopt);
  const std::string below = "/proc/self/fd/" + std::to_string(directory.get()) + "/file";
  EXPECT_EQ(resolve_links(below), below);  // an ordinary file of that directory
}

}  // namespace
}  // namespace ptsave
