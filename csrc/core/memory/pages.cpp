#include "core/memory/pages.h"

#include <unistd.h>

namespace ptsave {

std::size_t page_nbytes() noexcept {
  static const auto kNbytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return kNbytes;
}

namespace {

// Pieces over which the better kind's cost is averaged: a few huge pages are always slow.
constexpr std::int64_t kAveraged = 16;

constexpr PageKind other_than(PageKind kind) {
  return kind == PageKind::kHuge ? PageKind::kSmall : PageKind::kHuge;
}

}  // namespace

FreshPages& FreshPages::of_process() {
  static FreshPages pages;
  return pages;
}

FreshPages::Time FreshPages::cost(PageKind kind) const {
  const Time known{
      accounts_[static_cast<std::size_t>(kind)].cost_ns.load(std::memory_order_relaxed)};
  return kind == PageKind::kSmall && known == Time{0} ? kExpectedSmall : known;
}

PageKind FreshPages::better() const {
  return cost(PageKind::kHuge) <= cost(PageKind::kSmall) ? PageKind::kHuge : PageKind::kSmall;
}

PageKind FreshPages::choose(Time now) {
  const PageKind best = better();
  if (best == PageKind::kHuge && cost(best) <= kLeastSmall) return best;
  const PageKind other = other_than(best);
  std::atomic<std::int64_t>& retry_at = account(other).retry_at_ns;
  std::int64_t due = retry_at.load(std::memory_order_relaxed);
  if (now.count() < due) return best;
  const std::int64_t next = (now + kRetryFactor * cost(other)).count();
  return retry_at.compare_exchange_strong(due, next, std::memory_order_relaxed) ? other : best;
}

void FreshPages::took(PageKind kind, Time time, Time now) {
  Account& ours = account(kind);
  const std::int64_t before = ours.cost_ns.load(std::memory_order_relaxed);
  const bool averaged = before != 0 && kind == better();
  const std::int64_t cost = averaged ? before + (time.count() - before) / kAveraged : time.count();
  ours.cost_ns.store(cost, std::memory_order_relaxed);
  ours.retry_at_ns.store((now + kRetryFactor * time).count(), std::memory_order_relaxed);
}

}  // namespace ptsave
