// Files: owned descriptors, loops over short transfers, direct I/O, and atomic replacement.
//
// Every failure is an IoError that carries errno, the call and the file's name as the user gave it.
// Interrupted calls (EINTR) are retried here and nowhere else.
#pragma once

#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ptsave {

// Owns a file descriptor.  Move-only.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// Offsets of ptsave's own locks.  They are beyond the end of every file, so that users' locks on
// the file do not collide with them.  Saves and readers lock different offsets, so that a save does
// not wait for readers.
inline constexpr std::int64_t kInPlaceSaveByte = std::numeric_limits<std::int64_t>::max() - 1;
inline constexpr std::int64_t kReadersByte = kInPlaceSaveByte - 1;

// The largest piece of a write into the page cache.  A piece's size bounds the memory blocks that
// the kernel takes for it.  Blocks up to this size come from fragments.  A virtual machine's host
// takes larger free blocks back, and the first use of such a block costs a fault in the host.
// Writing 1.1 GB took 0.23 s in pieces of 256 KiB and 2.0 s in pieces of 1 MiB; warm, both took 0.2
// s.
inline constexpr std::size_t kCacheWriteNbytes = std::size_t{256} << 10;

// Alignment that direct I/O on a file requires; all zero if the file system has no direct I/O.
struct DirectIoAlignment {
  // Most disks that accept sectors of 512 bytes really have sectors of 4 KiB.
  static constexpr std::uint32_t kMinBlockNbytes = 4096;

  std::uint32_t memory = 0;
  std::uint32_t offset = 0;

  constexpr bool supported() const { return offset != 0; }
  // Positions and sizes of direct transfers are multiples of this.
  constexpr std::uint32_t block_nbytes() const { return std::max(kMinBlockNbytes, offset); }
  // Whether a direct transfer may begin at this address.
  bool takes_from(const std::byte* data) const {
    return memory != 0 && reinterpret_cast<std::uintptr_t>(data) % memory == 0;
  }
};

// An open file with its name.  The transfer functions are safe for concurrent use.
class File {
 public:
  File(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  static File open_for_reading(const std::string& path);
  // Opens the file behind `fd` again, or duplicates `fd` if not permitted.  The caller keeps `fd`.
  static File reopen_for_reading(int fd, std::string path);
  // Opens a file for writing without truncating it, and also for reading if permitted.  Creates a
  // missing file and then sets `created`.
  static File open_for_writing(const std::string& path, bool* created = nullptr);
  // Duplicates `fd`; both descriptors share a position and flags.
  static File duplicate(int fd, std::string path);

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  std::uint64_t nbytes() const;  // the file's current size
  // Numbers that change when the file changes: device, inode, size, and the time of the last
  // change, which programs cannot set back.
  using Identity = std::array<std::uint64_t, 4>;
  Identity identity() const;

  // Whether the page cache holds all of a range; false if the kernel does not say.
  bool is_cached(std::uint64_t offset, std::uint64_t nbytes) const;

  // Whether the file is on a network file system or FUSE.  There, each fault in a mapping fetches
  // only a few pages.
  bool is_remote() const;

  // Opens the same file once more, with its own position; empty if that is not permitted.
  Descriptor reopen() const;
  // Opens the same file for direct reads or writes; empty if that is not supported.
  Descriptor open_direct_reader() const;
  Descriptor open_direct_writer() const;
  DirectIoAlignment direct_io_alignment() const;

  // Reads exactly `nbytes` bytes.  A file that ends earlier is an IoError with errno 0 and
  // operation "pread (unexpected end of file)".
  void read_at(std::uint64_t offset, void* data, std::size_t nbytes) const;
  void write_at(std::uint64_t offset, const void* data, std::size_t nbytes) const;
  // Writes all pieces one after another, from `offset` on.
  void write_pieces_at(std::uint64_t offset, std::vector<iovec> pieces) const;
  // Reserves space, so that later writes cannot run out of it.  Does nothing on a file system that
  // cannot reserve space (never writes zeros).
  void preallocate(std::uint64_t nbytes) const;
  void truncate(std::uint64_t nbytes) const;
  // Gives a range of this file the bytes of another descriptor's range without moving them: both
  // files share the disk's blocks, or the file server copies them.  False if this is not possible.
  bool share(std::uint64_t offset, int from, std::uint64_t from_offset, std::uint64_t nbytes) const;
  // Syncs the file if `durable`.  Otherwise reports errors that a (network) file system delays
  // until close, such as lack of space.
  void finish(bool durable) const;
  void sync() const;

 private:
  Descriptor fd_;
  std::string path_;
};

// Replaces a file atomically.  The data goes to a temporary file in the same directory; commit()
// renames it over the target, the destructor discards it.  Names, mode and owner:
//
// - the temporary file is called ".<name>.<16 hex digits>.ptsave" and is locked (flock) while its
//   writer lives, which distinguishes it from the leftover of a killed process;
// - constructing an AtomicFile removes such leftovers of the same target;
// - the new file gets the replaced file's mode and, where permitted, owner; else 0666 and the
//   umask.
//
// `path` must not be a symbolic link (resolve it first).  Not safe for concurrent use.
class AtomicFile {
 public:
  // kKeep keeps leftovers, because they may still hold useful data.
  enum class Leftovers : std::uint8_t { kRemove, kKeep };

  // `display` is the name used in errors.
  AtomicFile(const std::string& path, std::string display,
             Leftovers leftovers = Leftovers::kRemove);
  ~AtomicFile();

  File& file() { return file_; }
  // Publishes the new file.  With `durable`, syncs file and directory first, so that the new file
  // survives power loss.  The blocks of the replaced file are freed later (core/io/late_release.h).
  void commit(bool durable);
  // Keeps the temporary file: the destructor does not remove it.
  void keep() { temporary_name_.clear(); }
  // The temporary file's name in the target's directory; empty once published, kept or discarded.
  const std::string& temporary_name() const { return temporary_name_; }

 private:
  void create_temporary(bool replaces);
  void adopt_ownership(const struct stat& old);
  void adopt_owner(unsigned uid, unsigned gid);
  void sync_directory();
  void discard();

  std::string display_;
  std::string name_;
  std::string temporary_name_;  // empty once published or discarded
  Descriptor directory_;
  File file_;
};

// Overwrites a file in place, for targets that cannot be replaced.  Other saves of the file, in any
// process, wait until this object is gone.  They wait for a lock on kInPlaceSaveByte, not for
// users' flock or lockf.  If the file system has no locks, saves do not wait.  Not safe for
// concurrent use.
class InPlaceFile {
 public:
  // Opens or creates the file; calls `poll`, which may throw, while it waits.
  InPlaceFile(std::string path, std::string display, const std::function<void()>& poll);
  // Removes a created file, unless commit() was called.
  ~InPlaceFile();

  File& file() { return file_; }
  // Empties the file, unless its disk reports too little room for the new bytes (IoError).
  void clear(std::uint64_t nbytes);
  void commit(bool durable);

 private:
  void open_locked(const std::function<void()>& poll);
  bool has_its_name() const;
  void release();

  std::string path_;
  File file_;
  bool locked_ = false;
  bool created_ = false;  // by this object, and no other save has seen it
};

// Follows symbolic links from `path` to the name that a save replaces.  Returns nothing if a link
// is in /proc (fd/3, exe), because such a link stands for an open file, not for a name.
std::optional<std::string> resolve_links(const std::string& path);

// Removes a file without waiting for its blocks (core/io/late_release.h); false if it is missing.
bool remove_file(const std::string& path);

// Removes the temporary files that killed writers of `path` left, as constructing an AtomicFile
// does.  Does nothing if the directory cannot be listed; throws IoError if it cannot be opened.
void remove_leftovers(const std::string& path);

// The name of the file that the temporary file `entry` was to replace, possibly shortened; empty if
// `entry` is not a temporary file's name.
std::string_view target_of_temporary(std::string_view entry);

}  // namespace ptsave
