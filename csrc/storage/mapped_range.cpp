#include "storage/mapped_range.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <string>

#include "core/base/error.h"
#include "core/memory/pages.h"

namespace ptsave {
namespace {

// The mapping that holds a storage of map_range().
std::span<std::byte> pages_of(const c10::Storage& storage) {
  auto* const data = static_cast<std::byte*>(storage.mutable_data());
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const PageRange pages = pages_covering(address, address + storage.nbytes(), page_nbytes());
  return {data - (address - pages.begin), static_cast<std::size_t>(pages.nbytes())};
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
  const PageRange pages = pages_covering(offset, offset + nbytes, page_nbytes());
  const auto mapped_nbytes = static_cast<std::size_t>(pages.nbytes());
  // MAP_NORESERVE: no memory for copies of written pages, because files may be larger than memory.
  void* memory = ::mmap(nullptr, mapped_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                        file.fd(), static_cast<off_t>(pages.begin));
  if (memory == MAP_FAILED) throw IoError(errno, "mmap", file.path());
  return at::from_blob(
      static_cast<std::byte*>(memory) + (offset - pages.begin), {numel},
      [memory, mapped_nbytes](void*) { ::munmap(memory, mapped_nbytes); }, options);
}

std::optional<at::Tensor> map_cached_range(const File& file, std::uint64_t offset,
                                           std::uint64_t nbytes) {
  if (!file.is_cached(offset, nbytes)) return std::nullopt;
  return map_range(file, offset, nbytes);
}

void detach_from_file(const c10::Storage& storage, const std::string& name) {
  const std::span<std::byte> pages = pages_of(storage);
  void* copy =
      ::mmap(nullptr, pages.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) throw std::bad_alloc();
  std::memcpy(copy, pages.data(), pages.size());
  if (::mremap(copy, pages.size(), pages.size(), MREMAP_MAYMOVE | MREMAP_FIXED, pages.data()) ==
      MAP_FAILED) {
    const int errnum = errno;
    ::munmap(copy, pages.size());
    throw IoError(errnum, "mremap", name);
  }
}

}  // namespace ptsave
