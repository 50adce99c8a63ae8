#include "storage/mapped_range.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <optional>
#include <string>

#include "core/buffer.h"
#include "core/error.h"

namespace ptsave {
namespace {

struct Pages {
  std::byte* begin = nullptr;
  std::size_t nbytes = 0;
};

// The mapping that a storage of map_range() is in.
Pages pages_of(const c10::Storage& storage) {
  auto* data = static_cast<std::byte*>(storage.mutable_data());
  const std::size_t lead = reinterpret_cast<std::uintptr_t>(data) % kPageNbytes;
  return {data - lead, static_cast<std::size_t>(align_up(lead + storage.nbytes(), kPageNbytes))};
}

}  // namespace

at::Tensor map_range(const File& file, std::uint64_t offset, std::uint64_t nbytes) {
  const std::uint64_t file_nbytes = file.nbytes();
  if (offset > file_nbytes || nbytes > file_nbytes - offset) {
    throw IoError(0, "map (beyond the end)", file.path());
  }
  const auto options = at::TensorOptions(at::kByte).device(at::kCPU);
  const auto numel = static_cast<std::int64_t>(nbytes);
  if (nbytes == 0) return at::empty({0}, options);
  const std::uint64_t begin = align_down(offset, kPageNbytes);
  const auto mapped_nbytes =
      static_cast<std::size_t>(align_up(offset + nbytes - begin, kPageNbytes));
  // No memory is put by for the copies that writing would make: files may be larger than memory.
  void* memory = ::mmap(nullptr, mapped_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                        file.fd(), static_cast<off_t>(begin));
  if (memory == MAP_FAILED) throw IoError(errno, "mmap", file.path());
  return at::from_blob(
      static_cast<std::byte*>(memory) + (offset - begin), {numel},
      [memory, mapped_nbytes](void*) { ::munmap(memory, mapped_nbytes); }, options);
}

std::optional<at::Tensor> map_cached_range(const File& file, std::uint64_t offset,
                                           std::uint64_t nbytes) {
  if (!file.is_cached(offset, nbytes)) return std::nullopt;
  return map_range(file, offset, nbytes);
}

void detach_from_file(const c10::Storage& storage, const std::string& name) {
  const Pages pages = pages_of(storage);
  void* copy =
      ::mmap(nullptr, pages.nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) throw std::bad_alloc();
  std::memcpy(copy, pages.begin, pages.nbytes);
  if (::mremap(copy, pages.nbytes, pages.nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, pages.begin) ==
      MAP_FAILED) {
    const int errnum = errno;
    ::munmap(copy, pages.nbytes);
    throw IoError(errnum, "mremap", name);
  }
}

}  // namespace ptsave
