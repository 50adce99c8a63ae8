#include "core/memory/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ptsave {
namespace {

std::chrono::nanoseconds now() { return std::chrono::steady_clock::now().time_since_epoch(); }

// Whether the page at this address is in memory.
bool is_present(std::byte* page) noexcept {
  unsigned char residency = 0;
  return ::mincore(page, 1, &residency) == 0 && (residency & 1) != 0;
}

}  // namespace

Mapping::Mapping(std::size_t nbytes, Use use) {
  if (nbytes == 0) return;
  if (nbytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
  nbytes_ = align_up(nbytes, page_nbytes());
  const bool huge = nbytes_ >= kHugePageNbytes;
  const std::size_t reserved = huge ? nbytes_ + kHugePageNbytes : nbytes_;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (use == Use::kParts ? MAP_NORESERVE : 0);
  void* memory = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
  if (!huge) return;
  // Trim to a huge-page boundary.
  const auto address = reinterpret_cast<std::uintptr_t>(data_);
  const std::size_t lead = align_up(address, kHugePageNbytes) - address;
  if (lead > 0) ::munmap(data_, lead);
  data_ += lead;
  if (lead < kHugePageNbytes) ::munmap(data_ + nbytes_, kHugePageNbytes - lead);
  const PageKind kind = FreshPages::of_process().better();
  kind_ = kind;
  advise(kind, 0, nbytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      kind_(other.kind_.load(std::memory_order_relaxed)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  kind_ = other.kind_.exchange(kind_.load());
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, nbytes_);
}

// Gives the kernel advice only: without huge pages the memory works, but slower.
void Mapping::advise(PageKind kind, std::size_t begin, std::size_t end) const noexcept {
  const int advice = kind == PageKind::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
  static_cast<void>(::madvise(data_ + begin, end - begin, advice));
}

// If two threads change the kind at the same time, one of them wins.
void Mapping::prefer(PageKind kind) const noexcept {
  std::optional<PageKind> before = kind_.load();
  if (before == kind || !before || !kind_.compare_exchange_strong(before, std::nullopt)) return;
  advise(kind, 0, nbytes_);
  kind_.store(kind);
}

void Mapping::populate(std::size_t begin, std::size_t end) const noexcept {
  const PageRange pages = pages_covering(begin, end, page_nbytes());
  for (std::size_t at = pages.begin; at < pages.end;) {
    const std::size_t piece_end =
        std::min<std::size_t>(align_down(at, kHugePageNbytes) + kHugePageNbytes, pages.end);
    populate_piece(at, piece_end);
    at = piece_end;
  }
}

// Skips memory that is already present from an earlier use.  Only whole huge pages are measured.
void Mapping::populate_piece(std::size_t begin, std::size_t end) const noexcept {
  if (is_present(data_ + begin) && is_present(data_ + end - page_nbytes())) return;
  const auto populate = [&] {
    return ::madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0;
  };
  if (end - begin < kHugePageNbytes) {
    static_cast<void>(populate());
    return;
  }
  FreshPages& pages = FreshPages::of_process();
  const PageKind kind = pages.choose(now());
  const PageKind better = pages.better();
  prefer(better);
  if (kind != better) advise(kind, begin, end);
  const auto is_as_chosen = [&] { return kind != better || kind_.load() == kind; };
  const bool was_as_chosen = is_as_chosen();
  const auto start = thread_cpu_time();
  const bool populated = populate();
  const auto time = thread_cpu_time() - start;
  if (populated && was_as_chosen && is_as_chosen()) pages.took(kind, time, now());
}

void Mapping::discard(std::size_t begin, std::size_t end) const noexcept {
  const PageRange pages = pages_inside(begin, end, page_nbytes());
  if (pages.empty()) return;
  static_cast<void>(::madvise(data_ + pages.begin, pages.nbytes(), MADV_DONTNEED));
}

void Mapping::exclude_from_children() const noexcept {
  static_cast<void>(::madvise(data_, nbytes_, MADV_DONTFORK));
}

void Mapping::abandon() noexcept {
  data_ = nullptr;
  nbytes_ = 0;
}

BufferPool::BufferPool(std::size_t count, std::size_t buffer_nbytes, Count how_many)
    : count_(count) {
  const std::size_t stride = align_up(buffer_nbytes, page_nbytes());
  for (;; count_ /= 2) {
    try {
      memory_ = Mapping(count_ * stride);
      break;
    } catch (const std::bad_alloc&) {  // as under `ulimit -v`
      if (how_many == Count::kExact || count_ <= 1) throw;
    }
  }
  free_.reserve(count_);
  for (std::size_t i = 0; i < count_; ++i) free_.push_back(memory_.data() + i * stride);
}

std::byte* BufferPool::acquire() {
  std::unique_lock lock(mutex_);
  released_.wait(lock, [this] { return !free_.empty(); });
  std::byte* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void BufferPool::release(std::byte* buffer) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(buffer);
  }
  released_.notify_one();
}

#if defined(__x86_64__)
namespace {

constexpr std::size_t kLineNbytes = 64;
// Strips are copied side by side, which keeps more of the memory's banks busy.
constexpr std::size_t kStripNbytes = 4096;
constexpr std::size_t kStrips = 4;
constexpr std::size_t kGroupNbytes = kStrips * kStripNbytes;
// A smaller copy may well be read from the cache afterwards.
constexpr std::size_t kMinNbytes = std::size_t{256} << 10;

// `target` is aligned to a line.
inline void stream_line(std::byte* target, const std::byte* source) {
  const auto* const from = reinterpret_cast<const __m128i*>(source);
  auto* const to = reinterpret_cast<__m128i*>(target);
  const __m128i a = _mm_loadu_si128(from);
  const __m128i b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2);
  const __m128i d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

inline void stream_group(std::byte* target, const std::byte* source) {
  for (std::size_t line = 0; line < kStripNbytes; line += kLineNbytes) {
    for (std::size_t strip = 0; strip < kGroupNbytes; strip += kStripNbytes) {
      stream_line(target + strip + line, source + strip + line);
    }
  }
}

}  // namespace

void stream_copy(std::byte* target, const std::byte* source, std::size_t nbytes) noexcept {
  if (nbytes < kMinNbytes) {
    if (nbytes > 0) std::memcpy(target, source, nbytes);
    return;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(target);
  std::size_t at = align_up(address, kLineNbytes) - address;
  std::memcpy(target, source, at);
  for (; at + kGroupNbytes <= nbytes; at += kGroupNbytes) stream_group(target + at, source + at);
  for (; at + kLineNbytes <= nbytes; at += kLineNbytes) stream_line(target + at, source + at);
  _mm_sfence();  // before the copy is announced to other threads
  std::memcpy(target + at, source + at, nbytes - at);
}
#else
void stream_copy(std::byte* target, const std::byte* source, std::size_t nbytes) noexcept {
  if (nbytes > 0) std::memcpy(target, source, nbytes);
}
#endif

}  // namespace ptsave
