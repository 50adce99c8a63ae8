#include "tensors/storage.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "core/memory/buffer.h"
#include "device/side_streams.h"

namespace ptsave {
namespace {

constexpr std::uintptr_t kTorchAlignment = 64;  // of c10::GetCPUAllocator()'s memory
// Upper bound of a record's header, descriptor and names, without alignment.
constexpr std::uint64_t kMaxSeamNbytes = 512;
// Bounds of a staged chunk: its minimum in the file and its maximum in memory.
constexpr std::uint64_t kMinChunkNbytes = (std::uint64_t{4} << 20) - (std::uint64_t{64} << 10);
constexpr std::uint64_t kMaxStagedChunkNbytes = std::uint64_t{4} << 20;

// Reserves addresses that nothing else in this process uses.  A mapping without write permission
// takes no memory, and no system's accounting counts it.
class ReservedAddresses final : public Owner {
 public:
  explicit ReservedAddresses(std::size_t nbytes)
      : nbytes_(nbytes),
        data_(::mmap(nullptr, nbytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  ~ReservedAddresses() override { ::munmap(data_, nbytes_); }

  std::size_t nbytes_;
  void* data_;
};

class OwnedMapping final : public Owner {
 public:
  explicit OwnedMapping(std::size_t nbytes) : memory_(nbytes) {}

  std::byte* data() const { return memory_.data(); }

 private:
  Mapping memory_;
};

void release_owner(void* context) { static_cast<Owner*>(context)->release(); }

c10::Storage wrap(std::uint64_t nbytes, c10::DataPtr data) {
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data),
                      c10::GetCPUAllocator(), /*resizable=*/false);
}

}  // namespace

int elements_per_byte(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::QUInt4x2:
      return 2;
    case c10::ScalarType::QUInt2x4:
      return 4;
    default:
      return 1;
  }
}

bool must_copy(const LoadedPayload& payload) {
  return reinterpret_cast<std::uintptr_t>(payload.data) % kTorchAlignment != 0;
}

c10::Storage empty_storage(std::uint64_t nbytes, c10::Device device) {
  const auto options = at::TensorOptions(at::kByte).device(device);
  c10::Storage storage = at::empty({static_cast<std::int64_t>(nbytes)}, options).storage();
  storage.unsafeGetStorageImpl()->set_resizable(false);
  return storage;
}

bool StorageList::in_reach() const {
  return std::ranges::all_of(storages, [](const c10::Storage& s) {
    return s.device().is_cpu() || SideStreams::are_supported(s.device());
  });
}

std::uint64_t StorageList::staging_nbytes(std::uint64_t alignment) const {
  std::uint64_t on_accelerators = 0;
  std::uint64_t others = 0;
  std::uint64_t file = 0;
  for (const c10::Storage& storage : storages) {
    file += storage.nbytes() + kMaxSeamNbytes + alignment;
    if (SideStreams::are_supported(storage.device())) {
      on_accelerators += storage.nbytes();
    } else if (!storage.device().is_cpu() || storage.data() != nullptr) {
      others += storage.nbytes();
    }
  }
  if (on_accelerators == 0) return others;
  // Each chunk has a buffer, whose size is the next power of two.
  const std::uint64_t n_chunks = file / kMinChunkNbytes + 2;
  return others + std::min(2 * on_accelerators, n_chunks * kMaxStagedChunkNbytes);
}

c10::Storage storage_over(LoadedPayload payload) {
  return wrap(payload.nbytes, c10::DataPtr(payload.data, payload.owner.detach(), &release_owner,
                                           c10::Device(c10::DeviceType::CPU)));
}

c10::Storage huge_page_storage(std::uint64_t nbytes) {
  auto* const memory = new OwnedMapping(nbytes);
  const OwnerReference owner(memory);
  c10::Storage storage = storage_over({memory->data(), nbytes, owner});
  storage.unsafeGetStorageImpl()->set_resizable(true);
  return storage;
}

std::vector<c10::Storage> unfilled_storages(std::span<const std::uint64_t> sizes) {
  std::uint64_t total = 1;
  for (const std::uint64_t nbytes : sizes) total += align_up(nbytes, kTorchAlignment);
  auto* const addresses = new ReservedAddresses(total);
  const OwnerReference owner(addresses);
  std::byte* place = addresses->data();
  std::vector<c10::Storage> storages;
  storages.reserve(sizes.size());
  for (const std::uint64_t nbytes : sizes) {
    storages.push_back(nbytes > 0 ? storage_over({place, nbytes, owner}) : make_storage({}));
    place += align_up(nbytes, kTorchAlignment);
  }
  return storages;
}

c10::Storage make_storage(LoadedPayload payload) {
  if (payload.nbytes > 0 && !must_copy(payload)) return storage_over(std::move(payload));
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(payload.nbytes);
  if (payload.nbytes > 0) std::memcpy(copy.get(), payload.data, payload.nbytes);
  return wrap(payload.nbytes, std::move(copy));
}

// Uses a TensorIterator, which calls at::parallel_for inside torch, because that template would
// have to be compiled with torch's OpenMP.  The iterated tensor has one dummy byte for each run.
void share_out(std::size_t n, std::size_t n_threads, const std::function<void(std::size_t)>& work) {
  const std::size_t n_runs = std::min(n, n_threads);
  if (n_runs < 2) {
    for (std::size_t i = 0; i < n; ++i) work(i);
    return;
  }
  at::TensorBase runs =
      at::detail::empty_cpu({static_cast<std::int64_t>(n_runs)}, c10::ScalarType::Byte);
  const auto* const first = static_cast<const char*>(runs.const_data_ptr());
  at::TensorIterator iterator = at::TensorIterator::nullary_op(runs);
  iterator.for_each(
      // There is one dimension: the last argument, the size of a second one, is 1.
      [&](char** data, const std::int64_t* /*strides*/, std::int64_t n_taken, std::int64_t) {
        const auto run = static_cast<std::size_t>(data[0] - first);
        const std::size_t end = (run + static_cast<std::size_t>(n_taken)) * n / n_runs;
        for (std::size_t i = run * n / n_runs; i < end; ++i) work(i);
      },
      /*grain_size=*/1);
}

}  // namespace ptsave
