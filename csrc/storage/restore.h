// Puts the bytes of an archive into existing tensors.
//
// Copies are collected first, so that all of them can be checked before the first one is made.  A
// copy that is no read into place goes through the record's own place in the reserved region.
// These copies use 32 MiB or one record at a time, and return the memory afterwards.  A transfer
// records the payloads that it has begun to place, so the changed targets are known after an error.
// Needs no GIL; not safe for concurrent use.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/read/reader.h"
#include "storage/copy_plan.h"

namespace ptsave {

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
