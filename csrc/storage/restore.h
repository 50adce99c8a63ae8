// Puts the bytes of an archive into tensors that exist already.
//
// The copies are collected first, so that everything can be checked before the first of them is
// made.  Copies that are no reads into place go through the record's own place in the reserved
// region, 32 MiB or one record at a time, which is given back after the copy.  A transfer notes
// which payloads it has begun to place, so after an error it is known which targets have changed.
// Nothing here needs the GIL; one thread at a time.
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

  // Both must outlive it.
  Restore(ArchiveReader& reader, StorageOf storage_of);

  // Plans target.copy_(source).  `record` is the source's, if its storage is a reserved one.
  void add(at::Tensor target, const at::Tensor& source, std::optional<std::size_t> record);
  // The same for all bytes of a record, into a storage of as many.
  void add(const c10::Storage& target, std::size_t record);
  // Makes the planned copies, and fills the storages of `records`, which stay filled.  Stops when
  // records turn out to be damaged, and returns them.  IoError; at::Error from a copy.
  std::vector<DamagedRecord> run(std::span<const std::size_t> records, const Options& options,
                                 const Poll& poll);
  bool is_filled(std::size_t record) const { return is_filled_[record]; }
  // The records from which targets were changed so far, or may have been.
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
  std::vector<bool> is_filled_;    // by record: its storage has its bytes
  std::vector<bool> has_changed_;  // by record: targets of copies from it
};

}  // namespace ptsave
