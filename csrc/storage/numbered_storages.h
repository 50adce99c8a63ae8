// Numbers the records of an archive to which objects are added one by one, so that a storage which
// nobody has changed since is written once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "storage/storage.h"

namespace ptsave {

// A storage is known again by its identity, the version of the tensor that refers to it, and its
// memory, size and dtype.  It is referred to weakly: its memory may go, its identity stays taken.
// So changes that torch does not count (through `.data`, through NumPy) are not seen.  One thread
// at a time.
class NumberedStorages {
 public:
  // The number of the record data/<number>, for one object: either commit() or rollback() ends it.
  std::uint32_t number(const c10::Storage& storage, const at::Tensor* tensor,
                       c10::ScalarType dtype);
  // Those of the object that have to be written: storage i has the number first_number() + i.
  const StorageList& fresh() const { return fresh_; }
  std::uint64_t fresh_nbytes() const;
  std::uint32_t first_number() const { return next_; }

  void commit();
  void rollback();
  // Everything that comes from here on is written anew.
  void forget() { known_.clear(); }

 private:
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion counter;
    std::uint32_t version;
    const void* data;
    std::size_t nbytes;
    c10::ScalarType dtype;
    std::uint32_t number;
  };

  void remove_dead();

  std::unordered_map<const c10::StorageImpl*, Known> known_;
  StorageList fresh_;
  std::vector<Known> tracked_;  // of them, those that can be known again
  std::uint32_t next_ = 0;
  std::size_t max_known_ = 1024;
  std::uint64_t nbytes_since_removal_ = 0;  // of storages that became known
};

}  // namespace ptsave
