// The system's page size, and the whole pages of a range.
//
// Three different sizes are 4 KiB on most machines.  The system's page is 4 KiB on x86-64 and 4, 16
// or 64 KiB on arm64.  The file system's block of direct I/O is in DirectIoAlignment.  Tuned sizes
// are constants where they are used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptsave {

constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) {
  return value - value % alignment;
}
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

// Asks the system once.
std::size_t page_nbytes() noexcept;

// Whole pages: [begin, end), both multiples of the page size.
struct PageRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  constexpr std::uint64_t nbytes() const { return end - begin; }
  constexpr bool empty() const { return begin == end; }
  bool operator==(const PageRange&) const = default;
};

// The whole pages inside [begin, end), which can be returned without touching a neighbour.
constexpr PageRange pages_inside(std::uint64_t begin, std::uint64_t end, std::uint64_t page) {
  const std::uint64_t first = align_up(begin, page);
  const std::uint64_t last = align_down(end, page);
  return first < last ? PageRange{first, last} : PageRange{first, first};
}

// The pages that hold a byte of [begin, end), which is not empty.
constexpr PageRange pages_covering(std::uint64_t begin, std::uint64_t end, std::uint64_t page) {
  return {align_down(begin, page), align_up(end, page)};
}

}  // namespace ptsave
