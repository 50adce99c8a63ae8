// Makes torch storages over ptsave's memory, distributes work on their bytes to torch's threads,
// and computes statistics of the bytes.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/memory/buffer.h"
#include "core/read/reader.h"
#include "core/statistics/statistics.h"
#include "device/side_streams.h"
#include "tensors/dtypes.h"

namespace ptsave {

inline constexpr std::uintptr_t kTorchAlignment = 64;  // of c10::GetCPUAllocator()'s memory

// Reserves addresses that nothing else in this process uses.  A mapping without write permission
// takes no memory, and every system's accounting ignores it.
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

inline void release_owner(void* context) { static_cast<Owner*>(context)->release(); }

inline c10::Storage cpu_storage(std::uint64_t nbytes, c10::DataPtr data) {
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data),
                      c10::GetCPUAllocator(), /*resizable=*/false);
}

// Whether make_storage() reads the payload's bytes.
inline bool must_copy(const LoadedPayload& payload) {
  return reinterpret_cast<std::uintptr_t>(payload.data) % kTorchAlignment != 0;
}

// A CPU storage of exactly these bytes, at any address.  A payload without data makes a hole.
inline c10::Storage storage_over(LoadedPayload payload) {
  return cpu_storage(payload.nbytes,
                     c10::DataPtr(payload.data, payload.owner.detach(), &release_owner,
                                  c10::Device(c10::DeviceType::CPU)));
}

// An ordinary CPU storage of the payload's bytes: shareable, freed by itself, and resizable after
// set_resizable(true).  That call must wait until the file's pickle has been run.  Until then a
// shape larger than its storage is an error, not a resize.  The storage keeps the payload's
// segments alive.  A payload at an address that torch's allocator would not choose (not a multiple
// of 64) is copied, so it must be complete.
inline c10::Storage make_storage(LoadedPayload payload) {
  if (payload.nbytes > 0 && !must_copy(payload)) return storage_over(std::move(payload));
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(payload.nbytes);
  if (payload.nbytes > 0) std::memcpy(copy.get(), payload.data, payload.nbytes);
  return cpu_storage(payload.nbytes, std::move(copy));
}

// A storage to fill on a device, not resizable before set_resizable(true).
inline c10::Storage empty_storage(std::uint64_t nbytes, c10::Device device) {
  const auto options = at::TensorOptions(at::kByte).device(device);
  c10::Storage storage = at::empty({static_cast<std::int64_t>(nbytes)}, options).storage();
  storage.unsafeGetStorageImpl()->set_resizable(false);
  return storage;
}

// A CPU storage in its own memory, in huge pages, for bytes written at once.  Throws
// std::bad_alloc.
inline c10::Storage huge_page_storage(std::uint64_t nbytes) {
  auto* const memory = new OwnedMapping(nbytes);
  const OwnerReference owner(memory);
  c10::Storage storage = storage_over({memory->data(), nbytes, owner});
  storage.unsafeGetStorageImpl()->set_resizable(true);
  return storage;
}

// CPU storages of these sizes that stand for bytes elsewhere: unique addresses without memory,
// which read as zero and cannot be written.  Throws std::bad_alloc.
inline std::vector<c10::Storage> unfilled_storages(std::span<const std::uint64_t> sizes) {
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

// Calls `work` for 0 .. n - 1, split into up to `n_threads` runs of neighbours, on the threads of
// torch's operators.  During training these threads are awake: they wait for the next operator in a
// busy loop for some milliseconds.  So they begin at once, while new threads would have to share
// their cores.  The runs are parallel unless torch has one thread (torch.set_num_threads) or this
// is one of torch's threads.  Rethrows an exception.
//
// Uses a TensorIterator, which calls at::parallel_for inside torch, because that template would
// have to be compiled with torch's OpenMP.  The iterated tensor has one dummy byte for each run.
inline void share_out(std::size_t n, std::size_t n_threads,
                      const std::function<void(std::size_t)>& work) {
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

// For fewer bytes, one thread is as fast.
inline constexpr std::size_t kMinSharedNbytes = std::size_t{512} << 10;

// The statistics of elements in CPU memory, computed while copying the bytes to `target`, unless it
// is null, by up to `n_threads` torch threads.
inline Statistics copy_with_statistics(Element element, std::byte* target, const std::byte* source,
                                       std::size_t nbytes, std::size_t n_threads) {
  ChunkedStatistics chunks(element, source, nbytes, target);
  share_out(chunks.n_chunks(), nbytes < kMinSharedNbytes ? 1 : n_threads,
            [&](std::size_t i) { chunks.take(i); });
  return chunks.result();
}

// The statistics of a contiguous CPU tensor with an Element.
inline Statistics statistics_of(const at::Tensor& tensor, std::size_t n_threads) {
  const Element element = element_of(tensor.scalar_type()).value();
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (n_threads < 2 || tensor.nbytes() < kMinSharedNbytes) {
    return statistics_of(element, data, tensor.nbytes());
  }
  return copy_with_statistics(element, nullptr, data, tensor.nbytes(), n_threads);
}

// The storages of an object that is being saved: storage i is the record data/i.
struct StorageList {
  std::vector<c10::Storage> storages;

  // Whether each storage is in CPU memory or on an accelerator that SideStreams supports.
  bool in_reach() const {
    return std::ranges::all_of(storages, [](const c10::Storage& s) {
      return s.device().is_cpu() || SideStreams::are_supported(s.device());
    });
  }
  // An upper bound of the host memory for copies, given the payloads' alignment in the file.  CPU
  // storages without memory count as empty.
  std::uint64_t staging_nbytes(std::uint64_t alignment) const {
    // Upper bound of a record's header, descriptor and names, without alignment.
    constexpr std::uint64_t kMaxSeamNbytes = 512;
    // Bounds of a staged chunk: its minimum in the file and its maximum in memory.
    constexpr std::uint64_t kMinChunkNbytes = (std::uint64_t{4} << 20) - (std::uint64_t{64} << 10);
    constexpr std::uint64_t kMaxStagedChunkNbytes = std::uint64_t{4} << 20;
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
};

}  // namespace ptsave
