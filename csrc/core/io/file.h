// Files: descriptors with owner, loops over short transfers, direct I/O, and files that appear
// whole or not at all.
//
// Every failure is an IoError that carries errno, the call and the file's name as the user gave it.
// EINTR is retried here and nowhere else.
#pragma once

#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
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
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// Bytes of a file that no file has, as off_t ends there, and that stand for ptsave's own locks on
// it: not those of people who lock the file themselves, and not each other, or a save would wait
// for readers.
inline constexpr std::int64_t kInPlaceSaveByte = std::numeric_limits<std::int64_t>::max() - 1;
inline constexpr std::int64_t kReadersByte = kInPlaceSaveByte - 1;

// Alignment that direct I/O on a file demands; all zero where the file system has none.
struct DirectIoAlignment {
  // Disks that take sectors of 512 bytes mostly have ones of 4 KiB.
  static constexpr std::uint32_t kMinBlockNbytes = 4096;

  std::uint32_t memory = 0;
  std::uint32_t offset = 0;

  constexpr bool supported() const { return offset != 0; }
  // Positions and sizes of direct transfers are multiples of this.
  constexpr std::uint32_t block_nbytes() const { return std::max(kMinBlockNbytes, offset); }
  // Whether a transfer may begin at an address.
  bool takes_from(const std::byte* data) const {
    return memory != 0 && reinterpret_cast<std::uintptr_t>(data) % memory == 0;
  }
};

// An open file of known name.  The transfer functions are safe for concurrent use.
class File {
 public:
  File(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  // Opens an existing file for reading.
  static File open_for_reading(const std::string& path);
  // A second, independent description of the file behind `fd` (which stays the caller's), or where
  // that is not permitted, a duplicate.
  static File reopen_for_reading(int fd, std::string path);
  // Opens a file for writing in place, without cutting it, or creates it, which `created` tells;
  // for reading, too, if that is permitted.
  static File open_for_writing(const std::string& path, bool* created = nullptr);
  // A duplicate of `fd`, sharing its position and flags.
  static File duplicate(int fd, std::string path);

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  std::uint64_t nbytes() const;  // the file's current size

  // Whether the page cache holds all of a part; false where the kernel does not tell.
  bool is_cached(std::uint64_t offset, std::uint64_t nbytes) const;

  // Whether it lies on a network file system, or one that a program serves (FUSE): there every
  // fault of a mapping is a request of a few pages.
  bool is_remote() const;

  // A second, independent description of the same file; empty where that is not permitted.
  Descriptor reopen() const;
  // The same file opened once more for direct reads or writes; empty where that is not supported.
  Descriptor open_direct_reader() const;
  Descriptor open_direct_writer() const;
  DirectIoAlignment direct_io_alignment() const;

  // Reads exactly `nbytes` bytes; a file that ends before is an IoError with errno 0 and operation
  // "pread (unexpected end of file)".
  void read_at(std::uint64_t offset, void* data, std::size_t nbytes) const;
  // Writes all of them.
  void write_at(std::uint64_t offset, const void* data, std::size_t nbytes) const;
  // Writes all pieces one after another, from `offset` on.
  void write_pieces_at(std::uint64_t offset, std::vector<iovec> pieces) const;
  // Reserves space so that later writes cannot fail for lack of it; does nothing where the file
  // system cannot (never writes zeros).
  void preallocate(std::uint64_t nbytes) const;
  void truncate(std::uint64_t nbytes) const;
  // Reports errors that the file system has put off until the file is closed, as network file
  // systems do with a lack of space.
  void flush() const;
  void sync() const;

 private:
  Descriptor fd_;
  std::string path_;
};

// Replaces a file atomically.  The data goes to a temporary file in the same directory; commit()
// renames it over the target, the destructor discards it.  Names, mode and owner:
//
// - the temporary file is called ".<name>.<16 hex digits>.ptsave" and is locked (flock) while its
//   writer lives, so that one left behind by a killed process can be told from one being written;
// - constructing an AtomicFile removes such leftovers of the same target;
// - the new file gets the replaced file's mode and, where permitted, owner; else 0666 and the
// umask.
//
// `path` must not be a symbolic link (resolve it first).  Not safe for concurrent use.
class AtomicFile {
 public:
  // Leftovers that still hold something of use stay with kKeep.
  enum class Leftovers : std::uint8_t { kRemove, kKeep };

  // `display` is the name used in errors.
  AtomicFile(const std::string& path, std::string display,
             Leftovers leftovers = Leftovers::kRemove);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  File& file() { return file_; }
  // Publishes the new file.  With `durable`, file and directory are synced, so that the new
  // file survives power loss once commit() has returned.  The blocks of the replaced file are freed
  // later (core/io/late_release.h).
  void commit(bool durable);
  // Lets the temporary file be, for good: the destructor does not remove it.
  void keep() { temporary_name_.clear(); }
  // Of the temporary file, in the target's directory; empty once published, kept or discarded.
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

// Overwrites a file in place, for targets that cannot be replaced.  A save at a time: another one,
// of this process or any other, waits until this object is gone (for a lock on a byte that no file
// has, which is neither flock's nor lockf's of those who lock the file themselves; where a file
// system has no locks, nobody waits).  Not safe for concurrent use.
class InPlaceFile {
 public:
  // Opens the file, or creates it; calls `poll`, which may throw, while it waits.
  InPlaceFile(std::string path, std::string display, const std::function<void()>& poll);
  InPlaceFile(const InPlaceFile&) = delete;
  InPlaceFile& operator=(const InPlaceFile&) = delete;
  // Without commit() a file that was created is removed.
  ~InPlaceFile();

  File& file() { return file_; }
  // Empties the file, if its disk, as far as it tells, has room for the bytes that are to come.
  void clear(std::uint64_t nbytes);
  void commit(bool durable);

 private:
  void open_locked(const std::function<void()>& poll);
  bool has_its_name() const;
  void release();

  std::string path_;
  File file_;
  bool locked_ = false;
  bool created_ = false;  // and seen by no other save
};

// The name that a file gets which replaces `path`: at the end of the symbolic links that it may be.
// Nothing if that is a link of /proc (fd/3, exe): it is an open file, whatever that is called.
std::optional<std::string> resolve_links(const std::string& path);

// Removes a file without waiting for its blocks (core/io/late_release.h); false if there is none.
bool remove_file(const std::string& path);

// Removes the temporary files that killed writers of `path` have left, as constructing an
// AtomicFile does.  A directory that cannot be listed keeps them; one that cannot be opened is an
// IoError.
void remove_leftovers(const std::string& path);

// The name of the file that the temporary file `entry` was to replace; empty if `entry` is not
// called like a temporary file.  (For a name too long to be extended it is the shortened one.)
std::string_view target_of_temporary(std::string_view entry);

}  // namespace ptsave
