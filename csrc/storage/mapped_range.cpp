#include "storage/mapped_range.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>

#include "core/buffer.h"
#include "core/error.h"

namespace ptsave {

at::Tensor map_range(const File& file, std::uint64_t offset, std::uint64_t nbytes) {
  const std::uint64_t file_nbytes = file.nbytes();
  if (offset > file_nbytes || nbytes > file_nbytes - offset) {
    throw IoError(0, "map (beyond the end)", file.path());
  }
  const auto options = at::TensorOptions(at::kByte).device(at::kCPU);
  const auto numel = static_cast<std::int64_t>(nbytes);
  if (nbytes == 0) return at::empty({0}, options);
  const std::uint64_t begin = align_down(offset, kPageNbytes);
  const auto mapped_nbytes = static_cast<std::size_t>(offset - begin + nbytes);
  // No memory is put by for the copies that writing would make: files may be larger than memory.
  void* memory = ::mmap(nullptr, mapped_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                        file.fd(), static_cast<off_t>(begin));
  if (memory == MAP_FAILED) throw IoError(errno, "mmap", file.path());
  return at::from_blob(
      static_cast<std::byte*>(memory) + (offset - begin), {numel},
      [memory, mapped_nbytes](void*) { ::munmap(memory, mapped_nbytes); }, options);
}

}  // namespace ptsave
