#include "core/io/page_cache.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/io/system.h"
#include "core/memory/pages.h"

namespace ptsave {

PageCacheFiller::~PageCacheFiller() {
  if (data_ != nullptr) ::munmap(data_, nbytes_);
}

void PageCacheFiller::map(const File& file) noexcept {
  try {
    nbytes_ = file.nbytes();
  } catch (const IoError&) {
    return;  // the reads that follow report it
  }
  if (nbytes_ == 0) return;
  void* const data = sys::map_file(file.fd(), nbytes_);
  if (data == MAP_FAILED) return;
  data_ = static_cast<std::byte*>(data);
  static_cast<void>(::madvise(data_, nbytes_, MADV_HUGEPAGE));
  static_cast<void>(::madvise(data_, nbytes_, MADV_DONTFORK));
}

bool PageCacheFiller::fill(const File& file, std::uint64_t offset, std::uint64_t nbytes) noexcept {
  std::call_once(mapped_, [&] { map(file); });
  if (data_ == nullptr || offset >= nbytes_) return false;
  const std::uint64_t end = offset + std::min(nbytes, nbytes_ - offset);
  const PageRange pages = pages_covering(offset, end, page_nbytes());
  std::byte* const begin = data_ + pages.begin;
  const bool filled = ::madvise(begin, pages.nbytes(), MADV_POPULATE_READ) == 0;
  // The pages stay in the cache, but do not count as this process's memory.
  static_cast<void>(::madvise(begin, pages.nbytes(), MADV_DONTNEED));
  return filled;
}

}  // namespace ptsave
