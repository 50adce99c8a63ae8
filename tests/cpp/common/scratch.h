// Folders that vanish with their test, whole files, bytes, forked parts of tests, and what the
// process holds.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "core/memory/pages.h"

namespace ptsave::common {

inline constexpr std::size_t kKiB = 1024;
inline constexpr std::size_t kMiB = 1024 * kKiB;
inline const std::function<void()> kNoPoll = [] {};

// A fresh folder below `parent`.  Removed with everything in it.
class Folder {
 public:
  explicit Folder(const std::string& parent = "/tmp") : path_(parent + "/ptsave-test-XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) ADD_FAILURE() << "no folder below " << parent;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.insert(entry.path().filename());
    }
    return names;
  }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream bytes;
  if (stream.peek() != EOF) bytes << stream.rdbuf();
  return std::move(bytes).str();
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  stream.close();
  if (!stream) ADD_FAILURE() << "cannot write " << path;
}

inline mode_t mode_of(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) ADD_FAILURE() << "no " << path;
  return status.st_mode & 07777;
}

// The next read of the file comes from the disk.
inline void drop_from_page_cache(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0) << path;
  ::fsync(fd);
  EXPECT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  ::close(fd);
}

// Bytes without a period that a misplaced piece could hide in.
inline std::string noise(std::size_t nbytes, std::uint64_t seed) {
  std::string bytes(nbytes, '\0');
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (std::size_t at = 0; at < nbytes; at += sizeof(state)) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(bytes.data() + at, &state, std::min(sizeof(state), nbytes - at));
  }
  return bytes;
}

inline std::span<std::byte> bytes_of(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}
inline std::byte* data_of(std::string& text) { return bytes_of(text).data(); }
inline const std::byte* data_of(const std::string& text) {
  return std::as_bytes(std::span(text)).data();
}
inline std::string text_of(const std::byte* data, std::size_t nbytes) {
  return {reinterpret_cast<const char*>(data), nbytes};
}

inline std::size_t n_entries(const char* directory) {
  const auto begin = std::filesystem::directory_iterator(directory);
  return static_cast<std::size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

inline std::size_t n_descriptors() { return n_entries("/proc/self/fd"); }

// Descriptors of files that have no name any more.
inline std::size_t n_removed_files_open() {
  std::size_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    n += std::filesystem::read_symlink(entry.path(), gone).string().ends_with(" (deleted)");
  }
  return n;
}

// ThreadSanitizer starts a thread of its own with the program's first one, so that comes first.
inline std::size_t n_threads() {
  static const bool started = [] {
    std::thread([] {}).join();
    ::usleep(20'000);  // a joined thread may still be listed for a moment
    return true;
  }();
  static_cast<void>(started);
  return n_entries("/proc/self/task");
}

// A joined thread may still be listed for a moment.
inline bool n_threads_becomes(std::size_t n) {
  for (int i = 0; i < 1000; ++i) {
    if (n_threads() == n) return true;
    ::usleep(1000);
  }
  return false;
}

// Runs `action` in a forked process that is killed when it takes too long; returns what wait says.
inline int in_child(const std::function<void()>& action) {
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr unsigned kMaxSeconds = 120;
    ::alarm(kMaxSeconds);
    action();
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

inline bool query_page(const std::byte* address, unsigned char& residency) {
  const auto page = align_down(reinterpret_cast<std::uintptr_t>(address), page_nbytes());
  return ::mincore(reinterpret_cast<void*>(page), 1, &residency) == 0;
}
inline bool is_mapped(const std::byte* address) {
  unsigned char residency = 0;
  return query_page(address, residency);
}
inline bool is_resident(const std::byte* address) {
  unsigned char residency = 0;
  return query_page(address, residency) && (residency & 1u) != 0;
}

}  // namespace ptsave::common
