// Makes torch storages over ptsave's memory, and shares work on their bytes out to torch's threads.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/read/placement.h"

namespace ptsave {

// An ordinary CPU storage of the payload's bytes: shareable, freed by itself, and resizable after
// set_resizable(true).  That call must wait until the file's pickle has been run.  Until then a
// shape larger than its storage is an error, not a resize.  The storage keeps the payload's
// segments alive.  A payload at an address that torch's allocator would not choose (not a multiple
// of 64) is copied, so it must be complete.
c10::Storage make_storage(LoadedPayload payload);

// A CPU storage of exactly these bytes, at any address; a hole without data.
c10::Storage storage_over(LoadedPayload payload);

// A storage to fill on a device, not resizable before set_resizable(true).
c10::Storage empty_storage(std::uint64_t nbytes, c10::Device device);

// A CPU storage in its own memory, in huge pages, for bytes written at once.  Throws
// std::bad_alloc.
c10::Storage huge_page_storage(std::uint64_t nbytes);

// CPU storages of these sizes that stand for bytes elsewhere: unique addresses without memory,
// which read as zero and cannot be written.  Throws std::bad_alloc.
std::vector<c10::Storage> unfilled_storages(std::span<const std::uint64_t> sizes);

// The number of elements in a byte: 1, except for quantized types with smaller elements.
int elements_per_byte(c10::ScalarType dtype);

// Whether make_storage() reads the payload's bytes.
bool must_copy(const LoadedPayload& payload);

// The storages of an object that is being saved: storage i is the record data/i.
struct StorageList {
  std::vector<c10::Storage> storages;

  // Whether each storage is in CPU memory or on an accelerator that SideStreams supports.
  bool in_reach() const;
  // An upper bound of the host memory for copies, given the payloads' alignment in the file.  CPU
  // storages without memory count as empty.
  std::uint64_t staging_nbytes(std::uint64_t alignment) const;
};

// For fewer bytes, one thread is as fast.
inline constexpr std::size_t kMinSharedNbytes = std::size_t{512} << 10;

// Calls `work` for 0 .. n - 1 in up to `n_threads` runs of neighbours, on the threads of torch's
// operators.  During training these threads are awake: they wait for the next operator in a busy
// loop for some milliseconds.  So they begin at once, while new threads would have to share their
// cores.  The runs are parallel
// unless torch has one thread (torch.set_num_threads) or this is one of torch's threads.  Rethrows
// an exception.
void share_out(std::size_t n, std::size_t n_threads, const std::function<void(std::size_t)>& work);

}  // namespace ptsave
