#include "core/memory/pages.h"

#include <unistd.h>

namespace ptsave {

std::size_t page_nbytes() noexcept {
  static const auto kNbytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return kNbytes;
}

}  // namespace ptsave
