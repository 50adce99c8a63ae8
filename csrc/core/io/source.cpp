#include "core/io/source.h"

#include <cerrno>
#include <cstring>

#include "core/base/error.h"
#include "core/io/system.h"
#include "core/memory/pages.h"

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

namespace {

// Devices fetch no more than this for one readahead request (see max_sectors_kb and read_ahead_kb),
// and silently drop the rest.
constexpr std::size_t kReadAheadNbytes = std::size_t{512} << 10;
// For less than half a folio, fetching a whole folio is not worth it.
constexpr std::size_t kFolioNbytes = std::size_t{2} << 20;

// Folios of 2 MiB come from the same blocks as huge pages, whose cost FreshPages has just measured.
bool large_blocks_are_cheap() { return FreshPages::of_process().better() == PageKind::kHuge; }

// Whether direct reads may begin at any page of the archive, into buffers at any page of memory.
bool fits_pages(const DirectIoAlignment& alignment, std::size_t page) {
  return page % alignment.block_nbytes() == 0 &&
         (alignment.memory == 0 || page % alignment.memory == 0);
}

}  // namespace

ByteSource::ByteSource(File file, std::uint64_t base_offset, DirectReads direct,
                       std::shared_ptr<SharedStart> start)
    : file_(std::move(file)),
      is_remote_(file_->is_remote()),
      is_told_(direct == DirectReads::kNever),
      cache_filler_(std::make_unique<PageCacheFiller>()),
      base_offset_(base_offset),
      name_(file_->path()) {
  const std::uint64_t file_nbytes = file_->nbytes();
  nbytes_ = file_nbytes > base_offset ? file_nbytes - base_offset : 0;
  if (direct == DirectReads::kNever) return;
  const DirectIoAlignment alignment = file_->direct_io_alignment();
  if (!fits_pages(alignment, page_nbytes()) || base_offset % alignment.block_nbytes() != 0) return;
  block_nbytes_ = alignment.block_nbytes();
  direct_ = file_->open_direct_reader();
  if (direct == DirectReads::kAlways) return;
  if (!start) start = std::make_shared<SharedStart>();
  co_readers_ = std::make_unique<CoReaders>(std::move(start));
}

ByteSource::ByteSource(const std::byte* data, std::uint64_t nbytes, std::string name)
    : memory_(data), nbytes_(nbytes), name_(std::move(name)) {}

const File& ByteSource::file() const {
  if (!file_) throw IoError(EBADF, "read (the file is closed)", name_);
  return *file_;
}

void ByteSource::announce() const {
  if (co_readers_) co_readers_->announce(*file_);
}

void ByteSource::read_at(std::uint64_t offset, void* data, std::size_t nbytes) const {
  if (offset > nbytes_ || nbytes > nbytes_ - offset) {
    throw IoError(0, "read (beyond the end)", name_);
  }
  if (nbytes == 0) return;
  if (memory_ != nullptr) {
    std::memcpy(data, memory_ + offset, nbytes);
  } else {
    file().read_at(base_offset_ + offset, data, nbytes);
  }
}

bool ByteSource::may_be_cached(std::uint64_t offset, std::size_t nbytes) const {
  if (memory_ != nullptr) return true;
  return sys::cached_pages(file().fd(), base_offset_ + offset, nbytes) != 0;
}

std::size_t ByteSource::read_cached(std::uint64_t offset, void* data, std::size_t nbytes) const {
  if (memory_ != nullptr) {
    read_at(offset, data, nbytes);
    return nbytes;
  }
  const ssize_t n =
      sys::pread_nowait(file().fd(), data, nbytes, static_cast<off_t>(base_offset_ + offset));
  return n < 0 ? 0 : static_cast<std::size_t>(n);
}

void ByteSource::read_ahead(std::uint64_t offset, std::size_t nbytes) const {
  if (memory_ != nullptr) return;
  if (!is_remote_ && is_shared() && nbytes >= kFolioNbytes / 2 && large_blocks_are_cheap() &&
      cache_filler_->fill(file(), base_offset_ + offset, nbytes)) {
    return;
  }
  while (nbytes > 0) {
    const std::size_t piece = std::min(nbytes, kReadAheadNbytes);
    // Readahead is a hint: if it fails, the reads that follow fetch the bytes.
    if (sys::read_ahead(file().fd(), static_cast<off_t>(base_offset_ + offset), piece) != 0) return;
    offset += piece;
    nbytes -= piece;
  }
}

bool ByteSource::read_direct(std::uint64_t offset, void* data, std::size_t nbytes) const {
  if (!direct_ || (co_readers_ && !co_readers_->absent(*file_, nbytes))) return false;
  const std::uint64_t end = std::min(offset + nbytes, align_up(nbytes_, block_nbytes_));
  auto* bytes = static_cast<std::byte*>(data);
  while (offset < end && offset < nbytes_) {
    const ssize_t n =
        sys::pread(direct_.get(), bytes, end - offset, static_cast<off_t>(base_offset_ + offset));
    if (n < 0 && errno == EINTR) continue;
    // The buffered read that follows works, or reports the error.
    if (n <= 0) return false;
    const auto advance = static_cast<std::size_t>(n);
    if (offset + advance < nbytes_ && advance % block_nbytes_ != 0) return false;
    bytes += advance;
    offset += advance;
  }
  return true;
}

}  // namespace ptsave
