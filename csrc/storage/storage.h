// torch storages over memory that ptsave has filled.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <span>
#include <vector>

#include "core/read/region.h"

namespace ptsave {

// An ordinary CPU storage of the payload's bytes: shareable, freed by itself, and resizable once
// set_resizable(true) is called on it, which must wait until the file's pickle has been run: a
// shape larger than its storage is then an error, not a resize.  It keeps the payload's segments
// alive.  A payload at an address that torch's allocator would not have chosen (not a multiple of
// 64) is copied; it must be complete then.
c10::Storage make_storage(LoadedPayload payload);

// A CPU storage of exactly these bytes, wherever they are; without data it is a hole.
c10::Storage storage_over(LoadedPayload payload);

// A storage of a device that can be filled, not resizable until set_resizable(true) is called on
// it.
c10::Storage empty_storage(std::uint64_t nbytes, c10::Device device);

// A CPU storage in memory of its own that asks for huge pages and begins with one, for bytes that
// are to be written at once.  std::bad_alloc.
c10::Storage huge_page_storage(std::uint64_t nbytes);

// CPU storages of these sizes that stand for bytes which are elsewhere: addresses without memory,
// of which no two are the same.  Their zeros can be read, nothing can be written.  std::bad_alloc.
std::vector<c10::Storage> unfilled_storages(std::span<const std::uint64_t> sizes);

// Number of elements in a byte: 1, but for the quantized types whose elements are smaller.
int elements_per_byte(c10::ScalarType dtype);

// Whether make_storage() looks at the payload's bytes.
bool must_copy(const LoadedPayload& payload);

// The storages of an object that is being saved: storage i is the record data/i.
struct StorageList {
  std::vector<c10::Storage> storages;

  // Whether each is in CPU memory or on an accelerator from which it can be staged.
  bool in_reach() const;
  // An upper bound of the host memory that copies take if payloads are aligned like this in the
  // file; a CPU storage without memory has no bytes.
  std::uint64_t staging_nbytes(std::uint64_t alignment) const;
};

}  // namespace ptsave
