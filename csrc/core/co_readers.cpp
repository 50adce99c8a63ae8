#include "core/co_readers.h"

#include <sys/types.h>

#include <limits>

#include "core/system.h"

namespace ptsave {
namespace {

// Files end before the largest offset that off_t can express.
constexpr off_t kAnnouncedByte = std::numeric_limits<off_t>::max() - 1;

}  // namespace

bool CoReaders::absent(const File& file, std::uint64_t nbytes) {
  std::call_once(announced_, [&] {
    announcement_ = file.reopen();
    // Where there are no such locks nobody learns of anybody, which costs time only.
    if (announcement_) sys::lock_byte(announcement_.get(), kAnnouncedByte);
  });
  if (nbytes_.fetch_add(nbytes, std::memory_order_relaxed) < kSharedStartNbytes) return false;
  return !announcement_ || sys::byte_is_locked(announcement_.get(), kAnnouncedByte) != 1;
}

}  // namespace ptsave
