// Space on disks: the size a file takes, and the free space.
#pragma once

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <cstdint>
#include <limits>

namespace ptsave {

// Bytes that the file's blocks take: less than its size if it has holes.
inline std::uint64_t allocated_nbytes(const struct stat& status) {
  constexpr std::uint64_t kBlockNbytes = 512;  // of st_blocks, on every file system
  return static_cast<std::uint64_t>(status.st_blocks) * kBlockNbytes;
}

// Free bytes of a file's file system; the maximum if unknown (an unlimited tmpfs has no blocks).
inline std::uint64_t free_nbytes(int fd) {
  struct statvfs disk{};
  const bool tells = ::fstatvfs(fd, &disk) == 0 && disk.f_blocks > 0;
  if (!tells) return std::numeric_limits<std::uint64_t>::max();
  return std::uint64_t{disk.f_bavail} * disk.f_frsize;
}

}  // namespace ptsave
