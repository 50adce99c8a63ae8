// Numbers the records of a growing archive, so that an unchanged storage is written once.
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

// A storage is recognized by its identity, its tensor's version, and its memory, size and dtype.
// So changes that torch does not count (through `.data` or NumPy) are not seen.  References to
// storages are weak: the memory may be freed, but the identity is not reused.  Not safe for
// concurrent use.
class NumberedStorages {
 public:
  // The number of a storage's record data/<number>, for an object that commit() or rollback() ends.
  std::uint32_t number(const c10::Storage& storage, const at::Tensor* tensor,
                       c10::ScalarType dtype);
  // The object's storages that have to be written: storage i has the number first_number() + i.
  const StorageList& fresh() const { return fresh_; }
  std::uint64_t fresh_nbytes() const;
  std::uint32_t first_number() const { return next_; }

  void commit();
  void rollback();
  // Forgets all storages, so that later ones are written again.
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
  std::vector<Known> tracked_;  // those that can be recognized later
  std::uint32_t next_ = 0;
  std::size_t max_known_ = 1024;
  std::uint64_t nbytes_since_removal_ = 0;  // of newly known storages
};

}  // namespace ptsave
