#include "core/io/co_readers.h"

#include "core/io/system.h"

namespace ptsave {

void CoReaders::announce(const File& file) {
  std::call_once(announced_, [&] {
    announcement_ = file.reopen();
    // Without byte-range locks, readers cannot see each other.  This only costs speed.
    if (announcement_) sys::lock_byte(announcement_.get(), F_RDLCK, kReadersByte);
  });
}

bool CoReaders::absent(const File& file, std::uint64_t nbytes) {
  announce(file);
  const bool is_over = start_->is_over(nbytes);
  if (!announcement_ || sys::byte_is_locked(announcement_.get(), kReadersByte) != 1) return is_over;
  found_.store(true, std::memory_order_relaxed);
  return false;
}

}  // namespace ptsave
