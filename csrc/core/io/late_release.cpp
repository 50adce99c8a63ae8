#include "core/io/late_release.h"

#include <linux/magic.h>
#include <pthread.h>
#include <sys/vfs.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "core/io/system.h"

namespace ptsave {
namespace {

// Smaller files are freed in about a millisecond: not worth a thread.
constexpr std::uint64_t kMinNbytes = std::uint64_t{8} << 20;
constexpr std::uint32_t kMaxPending = 4;

constexpr long kXfs = 0x58465342;  // <linux/magic.h> has no name for it
constexpr std::array kFreeAtLastClose{
    static_cast<long>(EXT4_SUPER_MAGIC),  kXfs,
    static_cast<long>(BTRFS_SUPER_MAGIC), static_cast<long>(F2FS_SUPER_MAGIC),
    static_cast<long>(TMPFS_MAGIC),       static_cast<long>(OVERLAYFS_SUPER_MAGIC)};

bool frees_at_last_close(const struct statfs& disk) {
  return std::ranges::find(kFreeAtLastClose, static_cast<long>(disk.f_type)) !=
         kFreeAtLastClose.end();
}

// Files whose blocks a thread frees one after the other; the thread ends after the last one.
class Releases {
 public:
  // Never destroyed: its thread may outlive the static objects of the process.
  static Releases& instance() {
    static auto* const kInstance = new Releases;
    return *kInstance;
  }

  void add(Descriptor held) {
    const std::lock_guard lock(mutex_);
    if (n_pending_.load() >= kMaxPending || !ensure_running()) return;
    waiting_.push_back(std::move(held));
    n_pending_.fetch_add(1);
  }

  void finish() noexcept {
    while (const std::uint32_t n = n_pending_.load()) n_pending_.wait(n);
  }

 private:
  Releases() {
    static_cast<void>(std::atexit([] { instance().finish(); }));
    // A fork waits until no file is pending, because the child would hold the files open while it
    // lives.
    const auto prepare = [] { instance().lock_when_idle(); };
    const auto in_parent = [] { instance().mutex_.unlock(); };
    const auto in_child = [] { instance().begin_child(); };
    if (::pthread_atfork(prepare, in_parent, in_child) != 0) throw std::bad_alloc();
  }

  bool ensure_running() {
    if (is_running_) return true;
    try {
      std::thread([this] { run(); }).detach();  // it waits for the caller's lock
    } catch (const std::system_error&) {
      return false;  // out of threads
    }
    return is_running_ = true;
  }

  void lock_when_idle() {
    for (;;) {
      finish();
      mutex_.lock();
      if (n_pending_.load() == 0) return;
      mutex_.unlock();
    }
  }

  // The child does not have the parent's thread, which may not yet have cleared is_running_.
  void begin_child() {
    is_running_ = false;
    mutex_.unlock();
  }

  void run() {
    for (;;) {
      Descriptor held;
      {
        const std::lock_guard lock(mutex_);
        is_running_ = !waiting_.empty();
        if (!is_running_) return;
        held = std::move(waiting_.front());
        waiting_.pop_front();
      }
      held.reset();
      n_pending_.fetch_sub(1);
      n_pending_.notify_all();
    }
  }

  std::mutex mutex_;
  std::deque<Descriptor> waiting_;
  bool is_running_ = false;
  std::atomic<std::uint32_t> n_pending_{0};
};

// Created while the library is loaded.  If a thread created it later, a child forked at that moment
// would wait for ever: the child does not have that thread.
[[gnu::constructor]] void make_at_load() noexcept {
  try {
    Releases::instance();
  } catch (const std::bad_alloc&) {
    return;  // the first use tries again
  }
}

}  // namespace

Descriptor hold_blocks(int directory, const std::string& name) {
  Descriptor held(sys::open_path(directory, name.c_str()));
  if (!held) return {};
  struct stat status{};
  struct statfs disk{};
  if (::fstat(held.get(), &status) != 0 || ::fstatfs(held.get(), &disk) != 0) return {};
  const std::uint64_t nbytes = allocated_nbytes(status);
  const bool is_last_name = S_ISREG(status.st_mode) && status.st_nlink == 1;
  const bool is_worth_it = is_last_name && nbytes >= kMinNbytes;
  const bool has_room_beside = free_nbytes(held.get()) >= nbytes;
  if (!is_worth_it || !frees_at_last_close(disk) || !has_room_beside) return {};
  return held;
}

void release_later(Descriptor held) noexcept {
  if (!held) return;
  try {
    Releases::instance().add(std::move(held));
  } catch (const std::bad_alloc&) {
    return;  // the descriptor is closed already
  }
}

void finish_releases() noexcept {
  try {
    Releases::instance().finish();
  } catch (const std::bad_alloc&) {
    return;  // nothing was ever released in the background
  }
}

}  // namespace ptsave
