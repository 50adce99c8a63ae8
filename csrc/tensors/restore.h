// Puts the bytes of an archive into existing tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/read/placement.h"
#include "core/read/reader.h"

namespace ptsave {

// A planned target.copy_(source).  The source is a tensor with values, or a view of a record.  A
// view is described by its place in the record's storage, because a reference to the storage would
// keep its memory.
struct TensorCopy {
  TensorCopy(at::Tensor to, const at::Tensor& from, std::optional<std::size_t> of_record);

  // Copies all bytes of a record.
  TensorCopy(at::Tensor to, std::size_t of_record);

  // The source, as a view of its record's storage.
  at::Tensor source_in(const c10::Storage& storage) const;

  at::Tensor target;
  std::optional<std::size_t> record;
  at::Tensor source;  // undefined if there is a record
  c10::ScalarType dtype;
  std::int64_t offset;  // in elements
  at::DimVector sizes;
  at::DimVector strides;
  bool conj;
  bool neg;
};

// The steps for a list of copies, which are identified by their indices.  First the destinations
// are read, then repeated copies are made from other copies' targets, then the others in their
// order.
struct CopySteps {
  struct Repeated {
    std::size_t copy;
    std::size_t of;
  };

  std::vector<Destination> destinations;  // on accelerators, target is the copy's number
  std::vector<std::size_t> direct;        // the destinations' copies
  std::vector<Repeated> repeated;
  std::vector<std::size_t> others;
};

// Plans copies from tensors whose bytes are still in an archive into existing tensors.  A copy is a
// read straight into place if dtype, strides and conjugation agree.  The same bytes for a second
// tensor are copied from the first.  Copies to overlapping targets keep their order, unless they
// copy the same bytes (tied parameters).  If `is_whole` of a record, its storage has its bytes or
// gets them, and copies are made from there.  Does not need the GIL.
CopySteps plan_copies(const std::vector<TensorCopy>& copies, const std::vector<bool>& is_whole);

// Copies are collected first, so that all of them can be checked before the first one is made.  A
// copy that is no read into place goes through the record's own place in the reserved region.
// These copies use 32 MiB or one record at a time, and return the memory afterwards.  A transfer
// records the payloads that it has begun to place, so the changed targets are known after an error.
// Needs no GIL; not safe for concurrent use.
class Restore {
 public:
  // The reserved storage of a record.
  using StorageOf = std::function<c10::Storage(std::size_t record)>;
  struct Options {
    std::size_t n_threads;
    bool verify;
    std::size_t max_pinned_nbytes;  // host memory for bytes that go on to accelerators
  };

  // `reader` must outlive this object, and all that `storage_of` refers to.
  Restore(ArchiveReader& reader, StorageOf storage_of);

  // Plans target.copy_(source).  `record` is the source's record, if its storage is reserved.
  void add(at::Tensor target, const at::Tensor& source, std::optional<std::size_t> record);
  // Plans a copy of a record's bytes into a storage of the same size.
  void add(const c10::Storage& target, std::size_t record);
  // Makes the planned copies, and fills the storages of `records`, which stay filled.  Stops at
  // damaged records and returns them.  Throws IoError, and at::Error from a copy.
  std::vector<DamagedRecord> run(std::span<const std::size_t> records, const Options& options,
                                 const Poll& poll);
  bool is_filled(std::size_t record) const { return is_filled_[record]; }
  // The records whose targets have changed or may have changed so far.
  std::vector<std::size_t> changed() const;

 private:
  std::vector<DamagedRecord> fill(std::vector<Destination> destinations, const Options& options,
                                  const Poll& poll);
  std::unique_ptr<Unstager> unstager_for(std::vector<Destination>& destinations,
                                         std::size_t max_leases) const;
  std::vector<DamagedRecord> read_direct(const CopySteps& steps, const std::vector<bool>& is_whole,
                                         const Options& options, const Poll& poll);
  std::vector<DamagedRecord> copy_others(const std::vector<std::size_t>& others,
                                         const Options& options, const Poll& poll);
  std::vector<at::Tensor> sources_of(std::span<const std::size_t> batch, const Options& options,
                                     const Poll& poll) const;
  void copy(const TensorCopy& copy, at::Tensor source, const Options& options, const Poll& poll);
  Destination own_storage(std::size_t record) const;

  ArchiveReader& reader_;
  StorageOf storage_of_;
  std::vector<TensorCopy> copies_;
  std::vector<bool> is_filled_;    // by record: whether its storage has its bytes
  std::vector<bool> has_changed_;  // by record: whether its targets may have changed
};

}  // namespace ptsave
