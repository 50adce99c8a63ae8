// Frees the blocks of replaced and removed files in the background.
//
// A file system frees a file's blocks when the file has no name and no open descriptor left.
// Normally that happens inside renameat() and unlinkat(), and takes 0.12 s per GB on ext4.  If a
// descriptor is still open, the blocks are freed inside its close() instead, and no saver has to
// wait for that.
#pragma once

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <cstdint>
#include <limits>
#include <string>

#include "core/io/file.h"

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

// Holds the blocks of the file `name` in `directory`, which is about to be replaced or removed.
// Returns an empty Descriptor if the blocks are better freed at once: for small files, files with
// more hard links, and disks without room for the next save.  Also returns it on file systems that
// are not known to free blocks at the last close (NFS renames an open file instead).
Descriptor hold_blocks(int directory, const std::string& name);

// Closes a held file in the background.  If several files are pending or no thread starts, closes
// it on this thread, and waits.
void release_later(Descriptor held) noexcept;

// Waits until the blocks of all released files are free.  Called by forks, at the end of the
// process, and when the disk is full.
void finish_releases() noexcept;

}  // namespace ptsave
