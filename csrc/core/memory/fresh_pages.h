// Decides whether fresh memory is made present by huge pages or by small ones.
//
// Huge pages normally win fourfold.  But a virtual machine's host takes free memory back in large
// blocks (balloon, free page reporting), and a huge page from such a block takes ten times as long
// as the small pages that come from fragments, which the host leaves alone.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace ptsave {

enum class PageKind : std::uint8_t { kHuge, kSmall };

// An account of the CPU time that the last pieces of fresh memory took, of kHugePageNbytes each.
// Safe for concurrent use, also across forks: a lost update costs time only.
class FreshPages {
 public:
  using Time = std::chrono::nanoseconds;

  // The time of a piece of small pages before the first one was measured, and the least it can be.
  static constexpr Time kExpectedSmall = std::chrono::microseconds{600};
  static constexpr Time kLeastSmall = std::chrono::microseconds{300};
  // A kind is tried again after this many times its last cost.
  static constexpr int kRetryFactor = 16;

  FreshPages() = default;
  FreshPages(const FreshPages&) = delete;
  FreshPages& operator=(const FreshPages&) = delete;
  ~FreshPages() = default;

  static FreshPages& of_process();

  // The kind that has cost less lately.
  PageKind better() const;
  // The kind for the next piece: the better one, or now and then the other, to measure it.
  PageKind choose(Time now);
  // Notes the CPU time of a piece.
  void took(PageKind kind, Time time, Time now);

 private:
  struct Account {
    std::atomic<std::int64_t> cost_ns{0};
    std::atomic<std::int64_t> retry_at_ns{0};
  };

  Account& account(PageKind kind) { return accounts_[static_cast<std::size_t>(kind)]; }
  Time cost(PageKind kind) const;

  std::array<Account, 2> accounts_;
};

// Tells from the first pieces of fresh memory whether the rest is cheap: pages of the page cache or
// of staging memory, filled.  Where the host has taken all free memory back, 4 MiB cost 12 to 25 ms
// of processor time, and 1 to 3 ms elsewhere; writing them past the page cache costs 1.6 ms always.
// Safe for concurrent use.
class MemoryGauge {
 public:
  // A piece took so much processor time to fill.
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
  // Once false it stays false: the next file or copy has a gauge of its own.
  bool is_cheap() const noexcept { return is_cheap_.load(std::memory_order_relaxed); }

 private:
  // Twice the usual time, the most that a MiB counts for (a virtual machine's host stops the
  // processor now and then), and the loss at which fresh memory is given up.
  static constexpr std::chrono::nanoseconds kCheapTimePerKib{700};
  static constexpr std::chrono::milliseconds kMaxLossPerMib{2};
  static constexpr std::chrono::nanoseconds kBearableLoss = std::chrono::milliseconds{8};

  std::atomic<std::int64_t> loss_ns_{0};
  std::atomic<bool> is_cheap_{true};
};

}  // namespace ptsave
