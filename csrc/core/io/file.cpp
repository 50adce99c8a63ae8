#include "core/io/file.h"

#include <dirent.h>
#include <linux/magic.h>
#include <sys/random.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <climits>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <thread>

#include "core/base/error.h"
#include "core/io/late_release.h"
#include "core/io/system.h"
#include "core/memory/pages.h"

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif

namespace ptsave {
namespace {

// Linux transfers at most 2 GiB in one call.  This limit keeps the results within 32 bits.
constexpr std::size_t kMaxTransferNbytes = std::size_t{1} << 30;

template <typename Call>
auto retry_interrupted(Call call) -> decltype(call()) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

// If the disk or a quota is full, retries the call once all replaced files' blocks are free.
template <typename Call>
auto retry_without_space(Call call) -> decltype(call()) {
  const auto result = retry_interrupted(call);
  if (result >= 0 || (errno != ENOSPC && errno != EDQUOT)) return result;
  finish_releases();
  return retry_interrupted(call);
}

[[noreturn]] void fail(const char* operation, const std::string& path) {
  throw IoError(errno, operation, path);
}

int open_or_fail(int dir_fd, const char* path, int flags, const std::string& display,
                 mode_t mode = 0) {
  const int fd =
      retry_interrupted([&] { return sys::openat(dir_fd, path, flags | O_CLOEXEC, mode); });
  if (fd < 0) fail("open", display);
  return fd;
}

// Whether the error means that the file system does not support the call, not that the call failed.
bool unsupported(int errnum) {
  return errnum == EOPNOTSUPP || errnum == ENOSYS || errnum == ENOTTY;
}

struct stat status_or_fail(int fd, const std::string& display) {
  struct stat status{};
  if (retry_interrupted([&] { return sys::fstat(fd, &status); }) != 0) fail("fstat", display);
  return status;
}

// Opens the file behind `fd` again.  Returns an empty Descriptor without /proc, or if only the
// first opener had permission.
Descriptor reopen_descriptor(int fd, int flags = O_RDONLY) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  return Descriptor(retry_interrupted([&] { return sys::reopen(link.c_str(), flags); }));
}

// Turns the kernel's own readahead off.  It would fill the page cache with bytes that are about to
// be read past the cache.  Only reads and read_ahead() then fetch bytes.
File without_guesses(Descriptor fd, std::string path) {
  ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_RANDOM);
  return {std::move(fd), std::move(path)};
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int Descriptor::release() { return std::exchange(fd_, -1); }

void Descriptor::reset() {
  // An interrupted close has closed the descriptor on Linux: never retry it.
  if (fd_ >= 0) sys::close(std::exchange(fd_, -1));
}

File File::open_for_reading(const std::string& path) {
  return without_guesses(Descriptor(open_or_fail(AT_FDCWD, path.c_str(), O_RDONLY, path)), path);
}

File File::reopen_for_reading(int fd, std::string path) {
  Descriptor again = reopen_descriptor(fd);
  // A duplicate shares the description's position, but read_at() does not move it.
  return again ? without_guesses(std::move(again), std::move(path))
               : duplicate(fd, std::move(path));
}

File File::open_for_writing(const std::string& path, bool* created) {
  constexpr mode_t kMode = 0666;  // less the umask
  const auto open = [&](int flags) {
    return retry_interrupted(
        [&] { return sys::openat(AT_FDCWD, path.c_str(), flags | O_CLOEXEC, kMode); });
  };
  constexpr int kMaxAttempts = 100;  // the file may come and go meanwhile
  for (int i = 0; i < kMaxAttempts; ++i) {
    int fd = open(O_RDWR);
    if (fd < 0 && errno == EACCES) fd = open(O_WRONLY);
    const bool is_missing = fd < 0 && errno == ENOENT;
    if (is_missing) fd = open(O_RDWR | O_CREAT | O_EXCL);
    if (is_missing && fd < 0 && errno == EEXIST) continue;
    if (fd < 0) break;
    if (created != nullptr) *created = is_missing;
    return {Descriptor(fd), path};
  }
  fail("open", path);
}

File File::duplicate(int fd, std::string path) {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail("fcntl", path);
  return {Descriptor(copy), std::move(path)};
}

std::uint64_t File::nbytes() const {
  return static_cast<std::uint64_t>(status_or_fail(fd(), path_).st_size);
}

File::Identity File::identity() const {
  constexpr std::int64_t kNanoseconds = 1'000'000'000;
  const struct stat status = status_or_fail(fd(), path_);
  const auto changed = status.st_ctim.tv_sec * kNanoseconds + status.st_ctim.tv_nsec;
  return {status.st_dev, status.st_ino, static_cast<std::uint64_t>(status.st_size),
          static_cast<std::uint64_t>(changed)};
}

bool File::is_cached(std::uint64_t offset, std::uint64_t nbytes) const {
  const PageRange pages = pages_covering(offset, offset + nbytes, page_nbytes());
  const std::uint64_t n_pages = pages.nbytes() / page_nbytes();
  return sys::cached_pages(fd(), offset, nbytes) == static_cast<std::int64_t>(n_pages);
}

bool File::is_remote() const {
  // The values of the kernel's headers, which not every system has: NFS, SMB (1, CIFS, 2), FUSE,
  // Lustre, Ceph, AFS, 9P, GPFS, BeeGFS, OrangeFS.
  constexpr std::array<std::int64_t, 12> kTypes{0x6969,     0x517b,     0xff534d42, 0xfe534d42,
                                                0x65735546, 0x0bd00bd0, 0x00c36400, 0x5346414f,
                                                0x01021997, 0x47504653, 0x19830326, 0x20030528};
  return std::ranges::find(kTypes, sys::file_system_type(fd())) != kTypes.end();
}

Descriptor File::open_direct_reader() const {
  return direct_io_alignment().supported() ? reopen_descriptor(fd(), O_DIRECT) : Descriptor();
}

Descriptor File::open_direct_writer() const {
  return direct_io_alignment().supported() ? reopen_descriptor(fd(), O_WRONLY | O_DIRECT)
                                           : Descriptor();
}

Descriptor File::reopen() const { return reopen_descriptor(fd()); }

DirectIoAlignment File::direct_io_alignment() const {
  struct statx status{};
  if (::statx(fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return {};
  if ((status.stx_mask & STATX_DIOALIGN) == 0) return {};
  // glibc 2.36 does not name the two fields yet: they follow stx_mnt_id.
  std::array<std::uint32_t, 2> alignment{};
  constexpr std::size_t kFieldOffset = 0x98;
  std::memcpy(alignment.data(), reinterpret_cast<const char*>(&status) + kFieldOffset,
              sizeof alignment);
  return {sys::device_alignment(alignment[0]), alignment[1]};
}

void File::read_at(std::uint64_t offset, void* data, std::size_t nbytes) const {
  auto* bytes = static_cast<std::byte*>(data);
  while (nbytes > 0) {
    const ssize_t n = retry_interrupted([&] {
      return sys::pread(fd(), bytes, std::min(nbytes, kMaxTransferNbytes),
                        static_cast<off_t>(offset));
    });
    if (n < 0) fail("pread", path_);
    if (n == 0) throw IoError(0, "pread (unexpected end of file)", path_);
    bytes += n;
    offset += static_cast<std::uint64_t>(n);
    nbytes -= static_cast<std::size_t>(n);
  }
}

void File::write_at(std::uint64_t offset, const void* data, std::size_t nbytes) const {
  const auto* bytes = static_cast<const std::byte*>(data);
  while (nbytes > 0) {
    const ssize_t n = retry_without_space([&] {
      return sys::pwrite(fd(), bytes, std::min(nbytes, kMaxTransferNbytes),
                         static_cast<off_t>(offset));
    });
    if (n < 0) fail("pwrite", path_);
    if (n == 0) throw IoError(EIO, "pwrite", path_);
    bytes += n;
    offset += static_cast<std::uint64_t>(n);
    nbytes -= static_cast<std::size_t>(n);
  }
}

void File::write_pieces_at(std::uint64_t offset, std::vector<iovec> pieces) const {
  for (std::span<iovec> left = pieces; !left.empty();) {
    const auto n_pieces = static_cast<int>(std::min<std::size_t>(left.size(), IOV_MAX));
    const ssize_t n = retry_without_space(
        [&] { return sys::pwritev(fd(), left.data(), n_pieces, static_cast<off_t>(offset)); });
    if (n < 0) fail("pwritev", path_);
    if (n == 0) throw IoError(EIO, "pwritev", path_);
    offset += static_cast<std::uint64_t>(n);
    for (auto written = static_cast<std::size_t>(n); written > 0;) {
      iovec& first = left.front();
      const std::size_t part = std::min(written, first.iov_len);
      first.iov_base = static_cast<std::byte*>(first.iov_base) + part;
      first.iov_len -= part;
      written -= part;
      if (first.iov_len == 0) left = left.subspan(1);
    }
  }
}

void File::preallocate(std::uint64_t nbytes) const {
  const auto reserve = [&] { return sys::fallocate(fd(), static_cast<off_t>(nbytes)); };
  if (retry_without_space(reserve) != 0 && !unsupported(errno)) fail("fallocate", path_);
}

void File::truncate(std::uint64_t nbytes) const {
  if (retry_interrupted([&] { return sys::ftruncate(fd(), static_cast<off_t>(nbytes)); }) != 0) {
    fail("ftruncate", path_);
  }
}

namespace {

// Whether the file is on a server that can copy ranges itself (NFS 4.2).
bool is_copied_by_server(const File& file) {
  constexpr std::int64_t kNfs = 0x6969;
  if (sys::file_system_type(file.fd()) != kNfs) return sys::is_on_server(false);
  const dev_t device = status_or_fail(file.fd(), file.path()).st_dev;
  const std::string field =
      " " + std::to_string(major(device)) + ":" + std::to_string(minor(device)) + " ";
  std::ifstream mounts("/proc/self/mountinfo");
  std::string line;
  while (std::getline(mounts, line) && line.find(field) == std::string::npos) {
  }
  return sys::is_on_server(line.find("vers=4.2") != std::string::npos);
}

}  // namespace

bool File::share(std::uint64_t offset, int from, std::uint64_t from_offset,
                 std::uint64_t nbytes) const {
  const auto to = static_cast<off_t>(offset);
  const auto begin = static_cast<off_t>(from_offset);
  if (retry_interrupted([&] { return sys::clone_range(fd(), to, from, begin, nbytes); }) == 0) {
    return true;
  }
  if (!is_copied_by_server(*this))
    return false;  // elsewhere the kernel would read and write the bytes
  for (std::uint64_t done = 0; done < nbytes;) {
    const auto step = static_cast<off_t>(done);
    const ssize_t n = retry_interrupted(
        [&] { return sys::copy_range(fd(), to + step, from, begin + step, nbytes - done); });
    if (n <= 0) return false;
    done += static_cast<std::uint64_t>(n);
  }
  return true;
}

void File::finish(bool durable) const {
  if (durable) return sync();
  if (retry_interrupted([&] { return sys::close_duplicate(fd()); }) != 0) fail("close", path_);
}

void File::sync() const {
  if (retry_interrupted([&] { return sys::fsync(fd()); }) != 0) fail("fsync", path_);
}

namespace {

constexpr std::string_view kTemporarySuffix = ".ptsave";
constexpr std::size_t kTokenNdigits = 16;
constexpr std::size_t kMaxNameNbytes = 255;
constexpr std::size_t kLongNamePrefixNbytes = 200;

std::string hex(std::uint64_t value) {
  std::array<char, kTokenNdigits + 1> digits{};
  std::snprintf(digits.data(), digits.size(), "%016" PRIx64, value);
  return digits.data();
}

std::uint64_t random_token() {
  std::uint64_t token = 0;
  if (::getrandom(&token, sizeof token, GRND_NONBLOCK) == sizeof token) return token;
  return std::random_device{}() ^ (std::uint64_t{std::random_device{}()} << 32);
}

// The prefix of every temporary file's name for target `name`.  If the name is too long to extend,
// the prefix is its first bytes and its hash.
std::string temporary_prefix(const std::string& name) {
  std::string prefix(".");
  if (name.size() + kTokenNdigits + kTemporarySuffix.size() + 2 <= kMaxNameNbytes) {
    return prefix.append(name).append(".");
  }
  prefix.append(name, 0, kLongNamePrefixNbytes).append("~");
  return prefix.append(hex(std::hash<std::string>{}(name))).append(".");
}

bool is_temporary(std::string_view entry, std::string_view prefix) {
  if (entry.size() != prefix.size() + kTokenNdigits + kTemporarySuffix.size()) return false;
  if (!entry.starts_with(prefix) || !entry.ends_with(kTemporarySuffix)) return false;
  const std::string_view token = entry.substr(prefix.size(), kTokenNdigits);
  return token.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Descriptor open_directory(const std::string& path, const std::string& display) {
  const int fd = retry_interrupted(
      [&] { return sys::openat(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd >= 0) return Descriptor(fd);
  // A directory that may be searched but not read (mode 0300) can still be written to.
  if (errno != EACCES) fail("open", display);
  return Descriptor(open_or_fail(AT_FDCWD, path.c_str(), O_PATH | O_DIRECTORY, display));
}

// The result of a lock without waiting.  If locks are unsupported, leftovers stay, because their
// writer may be alive.
enum class Lock { kTaken, kHeldElsewhere, kUnsupported };

Lock try_lock(int fd) {
  if (retry_interrupted([&] { return sys::flock(fd, LOCK_EX | LOCK_NB); }) == 0)
    return Lock::kTaken;
  return errno == EWOULDBLOCK ? Lock::kHeldElsewhere : Lock::kUnsupported;
}

void remove_leftovers(int directory, const std::string& name) {
  const int copy = ::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return;  // a directory that cannot be listed keeps its leftovers
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::fdopendir(copy), &::closedir);
  if (!listing) {
    sys::close(copy);
    return;
  }
  const std::string prefix = temporary_prefix(name);
  while (const dirent* entry = ::readdir(listing.get())) {  // NOLINT(concurrency-mt-unsafe)
    if (!is_temporary(entry->d_name, prefix)) continue;
    constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    const Descriptor leftover(
        retry_interrupted([&] { return sys::openat(directory, entry->d_name, kFlags); }));
    if (leftover && try_lock(leftover.get()) == Lock::kTaken) {
      retry_interrupted([&] { return sys::unlinkat(directory, entry->d_name); });
    }
  }
}

struct SplitPath {
  std::string directory;
  std::string name;
};

SplitPath split_path(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return {".", path};
  return {path.substr(0, std::max<std::size_t>(slash, 1)), path.substr(slash + 1)};
}

}  // namespace

bool remove_file(const std::string& path) {
  const SplitPath split = split_path(path);
  const Descriptor directory = open_directory(split.directory, path);
  Descriptor removed = hold_blocks(directory.get(), split.name);
  const int result =
      retry_interrupted([&] { return sys::unlinkat(directory.get(), split.name.c_str()); });
  if (result != 0 && errno != ENOENT) fail("unlink", path);
  release_later(std::move(removed));
  return result == 0;
}

void remove_leftovers(const std::string& path) {
  const SplitPath split = split_path(path);
  remove_leftovers(open_directory(split.directory, path).get(), split.name);
}

std::string_view target_of_temporary(std::string_view entry) {
  constexpr std::size_t kEndNbytes = 1 + kTokenNdigits + kTemporarySuffix.size();
  if (entry.size() <= 1 + kEndNbytes) return {};
  const std::string_view name = entry.substr(1, entry.size() - 1 - kEndNbytes);
  return is_temporary(entry, temporary_prefix(std::string(name))) ? name : std::string_view();
}

AtomicFile::AtomicFile(const std::string& path, std::string display, Leftovers leftovers)
    : display_(std::move(display)), file_(Descriptor(), display_) {
  SplitPath split = split_path(path);
  name_ = std::move(split.name);
  directory_ = open_directory(split.directory, display_);
  if (leftovers == Leftovers::kRemove) remove_leftovers(directory_.get(), name_);
  // Call stat only once: another save may replace or remove the file at any moment.
  struct stat old{};
  const bool replaces =
      retry_interrupted([&] { return sys::fstatat(directory_.get(), name_.c_str(), &old); }) == 0;
  if (!replaces && errno != ENOENT) fail("stat", display_);
  try {
    create_temporary(replaces);
    if (replaces) adopt_ownership(old);
  } catch (...) {
    discard();
    throw;
  }
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::discard() {
  if (temporary_name_.empty()) return;
  // An error cannot be reported from here; the next save removes a file that stays.
  retry_interrupted([&] { return sys::unlinkat(directory_.get(), temporary_name_.c_str()); });
  temporary_name_.clear();
}

void AtomicFile::create_temporary(bool replaces) {
  constexpr mode_t kPrivate = 0600;  // until adopt_ownership() has set the final mode
  constexpr mode_t kShared = 0666;   // less the umask
  for (;;) {
    const std::string name =
        temporary_prefix(name_) + hex(random_token()) + std::string(kTemporarySuffix);
    const int fd = retry_interrupted([&] {
      return sys::openat(directory_.get(), name.c_str(),
                         O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                         replaces ? kPrivate : kShared);
    });
    if (fd < 0 && errno == EEXIST) continue;
    if (fd < 0) fail("open", display_);
    file_ = File(Descriptor(fd), display_);
    // Between open and lock, another save may have removed the file as a leftover.
    temporary_name_ = name;
    if (try_lock(fd) != Lock::kHeldElsewhere && status_or_fail(fd, display_).st_nlink > 0) return;
    discard();
  }
}

void AtomicFile::adopt_ownership(const struct stat& old) {
  const struct stat fresh = status_or_fail(file_.fd(), display_);
  if (old.st_uid != fresh.st_uid || old.st_gid != fresh.st_gid) adopt_owner(old.st_uid, old.st_gid);
  constexpr mode_t kModeBits = 07777;
  if (retry_interrupted([&] { return sys::fchmod(file_.fd(), old.st_mode & kModeBits); }) != 0 &&
      !unsupported(errno) && errno != EPERM) {
    fail("fchmod", display_);
  }
}

void AtomicFile::adopt_owner(unsigned uid, unsigned gid) {
  // Only root may change the owner, but each user may choose among the user's own groups.  Without
  // the group, a shared folder's other users would lose access.  A failure is ignored, because the
  // data matters more.
  constexpr auto kUnchanged = static_cast<uid_t>(-1);
  if (retry_interrupted([&] { return sys::fchown(file_.fd(), uid, gid); }) == 0) return;
  retry_interrupted([&] { return sys::fchown(file_.fd(), kUnchanged, gid); });
}

void AtomicFile::commit(bool durable) {
  file_.finish(durable);
  Descriptor replaced = hold_blocks(directory_.get(), name_);
  const int renamed = retry_interrupted(
      [&] { return sys::renameat(directory_.get(), temporary_name_.c_str(), name_.c_str()); });
  if (renamed != 0) fail("rename", display_);
  temporary_name_.clear();
  if (durable) sync_directory();
  release_later(std::move(replaced));
}

void AtomicFile::sync_directory() {
  if (retry_interrupted([&] { return sys::fsync(directory_.get()); }) == 0) return;
  if (errno == EINVAL) return;  // a file system on which directories need no sync
  // An unreadable directory is open as O_PATH and cannot be synced alone.
  if (errno == EBADF && retry_interrupted([&] { return sys::syncfs(file_.fd()); }) == 0) return;
  fail("fsync", display_);
}

// ------------------------------------------------------------------------------------- InPlaceFile

namespace {

bool try_lock_byte(int fd) {
  if (retry_interrupted([&] { return sys::lock_byte(fd, F_WRLCK, kInPlaceSaveByte); }) == 0)
    return true;
  return errno != EAGAIN && errno != EACCES;  // a file system without locks
}

}  // namespace

InPlaceFile::InPlaceFile(std::string path, std::string display, const std::function<void()>& poll)
    : path_(std::move(path)), file_(Descriptor(), std::move(display)) {
  try {
    // A failed save may have removed the file that it had created, or another program may have
    // replaced it.  The loop ends even on file systems with unstable inode numbers, where
    // has_its_name() never holds.
    constexpr int kMaxAttempts = 16;
    for (int i = 0; i < kMaxAttempts; ++i) {
      open_locked(poll);
      if (has_its_name()) break;
    }
  } catch (...) {
    release();
    throw;
  }
}

InPlaceFile::~InPlaceFile() { release(); }

void InPlaceFile::open_locked(const std::function<void()>& poll) {
  locked_ = false;
  file_ = File(File::open_for_writing(path_, &created_));
  while (!try_lock_byte(file_.fd())) {
    created_ = false;  // another save has filled it by now
    poll();
    constexpr std::chrono::milliseconds kPause(5);
    std::this_thread::sleep_for(kPause);
  }
  locked_ = true;
}

bool InPlaceFile::has_its_name() const {
  struct stat named{};
  struct stat own{};
  if (retry_interrupted([&] { return sys::fstatat(AT_FDCWD, path_.c_str(), &named); }) != 0 ||
      retry_interrupted([&] { return sys::fstat(file_.fd(), &own); }) != 0) {
    return false;
  }
  return own.st_dev == named.st_dev && own.st_ino == named.st_ino;
}

void InPlaceFile::release() {
  if (!locked_) return;
  if (created_ && has_its_name()) {
    retry_interrupted([&] { return sys::unlinkat(AT_FDCWD, path_.c_str()); });
  }
  // Closing is not enough: a process forked meanwhile has the descriptor, too.
  sys::lock_byte(file_.fd(), F_UNLCK, kInPlaceSaveByte);
}

void InPlaceFile::clear(std::uint64_t nbytes) {
  if (!created_) {
    const std::uint64_t own = allocated_nbytes(status_or_fail(file_.fd(), file_.path()));
    const auto ask_for_room = [&] {
      const bool fits = nbytes <= own || nbytes - own <= free_nbytes(file_.fd());
      errno = ENOSPC;
      return fits ? 0 : -1;
    };
    if (retry_without_space(ask_for_room) != 0) fail("fallocate", file_.path());
  }
  file_.truncate(0);
}

void InPlaceFile::commit(bool durable) {
  file_.finish(durable);
  created_ = false;
}

std::optional<std::string> resolve_links(const std::string& path) {
  constexpr int kMaxLinks = 40;  // the kernel's own limit
  std::string target = path;
  for (int i = 0; i <= kMaxLinks; ++i) {
    std::array<char, PATH_MAX> text{};
    const ssize_t nbytes = ::readlink(target.c_str(), text.data(), text.size());
    if (nbytes < 0 && (errno == EINVAL || errno == ENOENT)) return target;
    if (nbytes < 0) fail("open", path);
    std::string directory = split_path(target).directory;
    struct statfs status{};
    if (::statfs(directory.c_str(), &status) != 0) fail("open", path);
    if (status.f_type == PROC_SUPER_MAGIC) return std::nullopt;
    const std::string next(text.data(), static_cast<std::size_t>(nbytes));
    target = next.starts_with('/') ? next : directory.append("/").append(next);
  }
  errno = ELOOP;
  fail("open", path);
}

}  // namespace ptsave
