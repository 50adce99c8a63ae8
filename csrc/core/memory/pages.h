// The system's pages: their size, the whole pages of a range, and the cost of fresh pages.
//
// Three different sizes are 4 KiB on most machines.  The system's page is 4 KiB on x86-64 and 4, 16
// or 64 KiB on arm64.  DirectIoAlignment has the file system's block for direct I/O.  Sizes that
// are tuned for speed are constants where they are used.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace ptsave {

constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) {
  return value - value % alignment;
}
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

// Returns the page size.  Asks the system only once.
inline std::size_t page_nbytes() noexcept {
  static const auto kNbytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return kNbytes;
}

// Whole pages: [begin, end), both multiples of the page size.
struct PageRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  constexpr std::uint64_t nbytes() const { return end - begin; }
  constexpr bool empty() const { return begin == end; }
  bool operator==(const PageRange&) const = default;
};

// The whole pages inside [begin, end), which can be returned to the system without losing bytes
// outside the range.
constexpr PageRange pages_inside(std::uint64_t begin, std::uint64_t end, std::uint64_t page) {
  const std::uint64_t first = align_up(begin, page);
  const std::uint64_t last = align_down(end, page);
  return first < last ? PageRange{first, last} : PageRange{first, first};
}

// The pages that hold a byte of [begin, end), which is not empty.
constexpr PageRange pages_covering(std::uint64_t begin, std::uint64_t end, std::uint64_t page) {
  return {align_down(begin, page), align_up(end, page)};
}

// The processor time of the calling thread: waiting for a core does not count.
inline std::chrono::nanoseconds thread_cpu_time() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

// Decides whether fresh memory gets huge pages or small ones.
//
// Huge pages are normally four times as fast.  But a virtual machine's host takes free memory back
// in large blocks (balloon, free page reporting).  A huge page from such a block takes ten times as
// long as small pages from fragments, which the host leaves alone.
enum class PageKind : std::uint8_t { kHuge, kSmall };

// Records the CPU time of the last pieces of fresh memory, of kHugePageNbytes each.  Safe for
// concurrent use, also across forks: a lost update costs time only.
class FreshPages {
 public:
  using Time = std::chrono::nanoseconds;

  // The time of a piece of small pages: the expected one before any measurement, and the minimum.
  static constexpr Time kExpectedSmall = std::chrono::microseconds{600};
  static constexpr Time kLeastSmall = std::chrono::microseconds{300};
  // The more expensive kind is tried again after this factor times its last cost.
  static constexpr int kRetryFactor = 16;

  static FreshPages& of_process() {
    static FreshPages pages;
    return pages;
  }

  // The kind that cost less lately.
  PageKind better() const {
    return cost(PageKind::kHuge) <= cost(PageKind::kSmall) ? PageKind::kHuge : PageKind::kSmall;
  }
  // The kind for the next piece: the better kind, or now and then the other, to measure it.
  PageKind choose(Time now) {
    const PageKind best = better();
    if (best == PageKind::kHuge && cost(best) <= kLeastSmall) return best;
    const PageKind other = best == PageKind::kHuge ? PageKind::kSmall : PageKind::kHuge;
    std::atomic<std::int64_t>& retry_at = account(other).retry_at_ns;
    std::int64_t due = retry_at.load(std::memory_order_relaxed);
    if (now.count() < due) return best;
    const std::int64_t next = (now + kRetryFactor * cost(other)).count();
    return retry_at.compare_exchange_strong(due, next, std::memory_order_relaxed) ? other : best;
  }

  // Records the CPU time of a piece.
  void took(PageKind kind, Time time, Time now) {
    Account& ours = account(kind);
    const std::int64_t before = ours.cost_ns.load(std::memory_order_relaxed);
    const bool averaged = before != 0 && kind == better();
    const std::int64_t cost =
        averaged ? before + (time.count() - before) / kAveraged : time.count();
    ours.cost_ns.store(cost, std::memory_order_relaxed);
    ours.retry_at_ns.store((now + kRetryFactor * time).count(), std::memory_order_relaxed);
  }

 private:
  // Pieces over which the better kind's cost is averaged, because a few huge pages are always slow.
  static constexpr std::int64_t kAveraged = 16;

  struct Account {
    std::atomic<std::int64_t> cost_ns{0};
    std::atomic<std::int64_t> retry_at_ns{0};
  };

  Account& account(PageKind kind) { return accounts_[static_cast<std::size_t>(kind)]; }
  Time cost(PageKind kind) const {
    const Time known{
        accounts_[static_cast<std::size_t>(kind)].cost_ns.load(std::memory_order_relaxed)};
    return kind == PageKind::kSmall && known == Time{0} ? kExpectedSmall : known;
  }

  std::array<Account, 2> accounts_;
};

// Predicts from the first pieces of fresh memory, in the page cache or staging memory, whether the
// rest is cheap to fill.  If the host has taken all free memory back, 4 MiB cost 12 to 25 ms of
// processor time, else 1 to 3 ms.  Writing them past the page cache always costs 1.6 ms.  Safe for
// concurrent use.
class MemoryGauge {
 public:
  // Records the processor time that filling a piece took.
  void note(std::size_t nbytes, std::chrono::nanoseconds took) noexcept {
    const auto kib = static_cast<std::int64_t>(nbytes >> 10);
    const std::chrono::nanoseconds most = kMaxLossPerMib * std::max<std::int64_t>(kib >> 10, 1);
    const std::int64_t loss = std::min(took - kCheapTimePerKib * kib, most).count();
    // Time won earlier does not offset a later loss: the account never falls below zero.
    std::int64_t before = loss_ns_.load(std::memory_order_relaxed);
    while (!loss_ns_.compare_exchange_weak(before, std::max<std::int64_t>(before + loss, 0),
                                           std::memory_order_relaxed)) {
    }
    if (before + loss > kBearableLoss.count()) is_cheap_.store(false, std::memory_order_relaxed);
  }
  // Once false, it stays false: the next file or copy has a gauge of its own.
  bool is_cheap() const noexcept { return is_cheap_.load(std::memory_order_relaxed); }

 private:
  // Twice the usual time.  The largest loss that is counted for one MiB, because a host may stop
  // its virtual machine.  The total loss at which fresh memory counts as expensive.
  static constexpr std::chrono::nanoseconds kCheapTimePerKib{700};
  static constexpr std::chrono::milliseconds kMaxLossPerMib{2};
  static constexpr std::chrono::nanoseconds kBearableLoss = std::chrono::milliseconds{8};

  std::atomic<std::int64_t> loss_ns_{0};
  std::atomic<bool> is_cheap_{true};
};

}  // namespace ptsave
