// Asks the kernel which pages are there, for the tests of what is mapped and given back.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "core/memory/pages.h"

namespace ptsave::residency {

inline bool query(const std::byte* address, unsigned char& residency) {
  const auto page = align_down(reinterpret_cast<std::uintptr_t>(address), page_nbytes());
  return ::mincore(reinterpret_cast<void*>(page), 1, &residency) == 0;
}

inline bool is_mapped(const std::byte* address) {
  unsigned char residency = 0;
  return query(address, residency);
}

inline bool is_resident(const std::byte* address) {
  unsigned char residency = 0;
  return query(address, residency) && (residency & 1u) != 0;
}

}  // namespace ptsave::residency
