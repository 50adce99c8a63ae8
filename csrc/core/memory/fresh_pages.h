// Decides whether fresh memory is made present by huge pages or by small ones.
//
// Huge pages normally win fourfold.  But a virtual machine's host takes free memory back in large
// blocks (balloon, free page reporting), and a huge page from such a block takes ten times as long
// as the small pages that come from fragments, which the host leaves alone.
#pragma once

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

}  // namespace ptsave
