// The system calls of core, each behind one inline function, so that a test build
// (PTSAVE_FAULT_INJECTION) can make it fail or transfer less.  file.cpp handles retries and errors.
#pragma once

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace ptsave::sys {

#ifdef PTSAVE_FAULT_INJECTION
// Called before every call with its name and, for a transfer, the byte count, which the hook may
// lower.  Returns 0 to allow the call, or the errno of its failure.  Set by tests; may be null.
using FaultHook = int (*)(const char* call, std::size_t* nbytes);
inline FaultHook fault_hook = nullptr;

inline bool fault(const char* call, std::size_t* nbytes = nullptr) {
  const int errnum = fault_hook != nullptr ? fault_hook(call, nbytes) : 0;
  if (errnum != 0) errno = errnum;
  return errnum != 0;
}

// Simulates a device with another memory alignment.  Set by tests; may be null.
using DeviceHook = std::uint32_t (*)(std::uint32_t alignment);
inline DeviceHook device_hook = nullptr;

inline std::uint32_t device_alignment(std::uint32_t alignment) {
  return device_hook != nullptr ? device_hook(alignment) : alignment;
}

// Simulates a file server that copies ranges.  Set by tests.
inline bool server_hook = false;

inline bool is_on_server(bool is_found) { return server_hook || is_found; }
#else
inline constexpr bool fault(const char* /*call*/, std::size_t* /*nbytes*/ = nullptr) {
  return false;
}
inline constexpr std::uint32_t device_alignment(std::uint32_t alignment) { return alignment; }
inline constexpr bool is_on_server(bool is_found) { return is_found; }
#endif

inline int openat(int dir_fd, const char* path, int flags, mode_t mode = 0) {
  return fault("openat") ? -1 : ::openat(dir_fd, path, flags, mode);
}
// Opens an open file again by its name in /proc, which creates a second open file description.
inline int reopen(const char* link, int flags) {
  return fault("reopen") ? -1 : ::openat(AT_FDCWD, link, flags | O_CLOEXEC);
}
// Opens a descriptor that only identifies the file, which needs no permission on it.
inline int open_path(int dir_fd, const char* path) {
  return fault("open_path") ? -1 : ::openat(dir_fd, path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
}
inline int close(int fd) {
  return ::close(fd);  // never injected: a failed close leaves no fd that a retry could use
}
// Closes a duplicate of `fd`: the file system then reports errors that it delays until a close.
inline int close_duplicate(int fd) {
  if (fault("close")) return -1;
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  return copy < 0 ? -1 : ::close(copy);
}
inline ssize_t pread(int fd, void* data, std::size_t nbytes, off_t offset) {
  return fault("pread", &nbytes) ? -1 : ::pread(fd, data, nbytes, offset);
}
inline ssize_t pread_nowait(int fd, void* data, std::size_t nbytes, off_t offset) {
  if (fault("preadv2", &nbytes)) return -1;
  const iovec piece{data, nbytes};
  return ::preadv2(fd, &piece, 1, offset, RWF_NOWAIT);
}
inline ssize_t pwrite(int fd, const void* data, std::size_t nbytes, off_t offset) {
  return fault("pwrite", &nbytes) ? -1 : ::pwrite(fd, data, nbytes, offset);
}
// Writes several pieces by one call.  If a test lowers the byte count, writes only the first piece.
inline ssize_t pwritev(int fd, const iovec* pieces, int n_pieces, off_t offset) {
  std::size_t nbytes = pieces[0].iov_len;
  if (fault("pwritev", &nbytes)) return -1;
  if (nbytes < pieces[0].iov_len) return ::pwrite(fd, pieces[0].iov_base, nbytes, offset);
  return ::pwritev(fd, pieces, n_pieces, offset);
}
inline int fstat(int fd, struct stat* status) { return fault("fstat") ? -1 : ::fstat(fd, status); }
inline int fstatat(int dir_fd, const char* path, struct stat* status) {
  return fault("fstatat") ? -1 : ::fstatat(dir_fd, path, status, 0);
}
// Number of a range's pages that are in the page cache; -1 if the kernel does not say.
inline std::int64_t cached_pages(int fd, std::uint64_t offset, std::uint64_t nbytes) {
  constexpr long kCachestat = 451;  // the same number on every architecture
  const std::array<std::uint64_t, 2> range{offset, nbytes};
  std::array<std::uint64_t, 5> counts{};
  if (::syscall(kCachestat, fd, range.data(), counts.data(), 0) != 0) return -1;
  return static_cast<std::int64_t>(counts[0]);
}
// The number of the file system's type; -1 on failure.
inline std::int64_t file_system_type(int fd) {
  struct statfs status{};
  if (fault("fstatfs") || ::fstatfs(fd, &status) != 0) return -1;
  return static_cast<std::int64_t>(static_cast<std::uint32_t>(status.f_type));
}
inline int fallocate(int fd, off_t nbytes) {
  return fault("fallocate") ? -1 : ::fallocate(fd, 0, 0, nbytes);
}
// Lets a range of `fd` share the blocks of another file's range.
inline int clone_range(int fd, off_t offset, int from, off_t from_offset, std::size_t nbytes) {
  if (fault("clone_range")) return -1;
  file_clone_range range{};
  range.src_fd = from;
  range.src_offset = static_cast<__u64>(from_offset);
  range.src_length = nbytes;
  range.dest_offset = static_cast<__u64>(offset);
  return ::ioctl(fd, FICLONERANGE, &range);
}
inline ssize_t copy_range(int fd, off_t offset, int from, off_t from_offset, std::size_t nbytes) {
  if (fault("copy_range", &nbytes)) return -1;
  return ::copy_file_range(from, &from_offset, fd, &offset, nbytes, 0);
}
inline int ftruncate(int fd, off_t nbytes) {
  return fault("ftruncate") ? -1 : ::ftruncate(fd, nbytes);
}
inline int fsync(int fd) { return fault("fsync") ? -1 : ::fsync(fd); }
inline int syncfs(int fd) { return fault("syncfs") ? -1 : ::syncfs(fd); }
inline int fchmod(int fd, mode_t mode) { return fault("fchmod") ? -1 : ::fchmod(fd, mode); }
inline int fchown(int fd, uid_t uid, gid_t gid) {
  return fault("fchown") ? -1 : ::fchown(fd, uid, gid);
}
// Locks a byte of the file for this open file description (F_RDLCK, F_WRLCK, F_UNLCK) without
// waiting.
inline int lock_byte(int fd, short type, off_t offset) {
  if (fault("lock_byte")) return -1;
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = offset;
  lock.l_len = 1;
  return ::fcntl(fd, F_OFD_SETLK, &lock);
}
// Whether another open file description holds a lock on the byte; -1 on failure.
inline int byte_is_locked(int fd, off_t offset) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = offset;
  lock.l_len = 1;
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) return -1;
  return lock.l_type == F_UNLCK ? 0 : 1;
}
// Requests a part of the file for the page cache, without waiting.
inline ssize_t read_ahead(int fd, off_t offset, std::size_t nbytes) {
  return ::readahead(fd, offset, nbytes);
}
// Maps the file for reading; MAP_FAILED with errno set on failure.
inline void* map_file(int fd, std::size_t nbytes) {
  return fault("mmap") ? MAP_FAILED : ::mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd, 0);
}
inline int flock(int fd, int operation) { return fault("flock") ? -1 : ::flock(fd, operation); }
inline int renameat(int dir_fd, const char* from, const char* to) {
  return fault("renameat") ? -1 : ::renameat(dir_fd, from, dir_fd, to);
}
inline int unlinkat(int dir_fd, const char* path) {
  return fault("unlinkat") ? -1 : ::unlinkat(dir_fd, path, 0);
}

}  // namespace ptsave::sys
