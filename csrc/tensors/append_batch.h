// Storages that are appended to a growing archive: their numbers, and batches of their records.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/memory/staging_pool.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"
#include "core/statistics/statistics.h"
#include "core/write/appended_archive.h"
#include "device/accelerator_copies.h"
#include "tensors/storage.h"

namespace ptsave {

// Numbers the records of a growing archive, so that an unchanged storage is written once.
//
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

// A pickle of a dict begins with this, in protocol 2: an empty dict, stored in the memo.  Parts
// that add entries follow, and then the full stop.
inline constexpr std::string_view kDictHead{"\x80\x02}q\x00", 5};
inline constexpr char kStop = '.';

// Records that are appended to an archive together, and the copies of their storages.  Copies lie
// one behind the other in slabs of one size, so that the pool can reuse returned slabs, whatever
// the sizes of the storages are.  Not safe for concurrent use.
class AppendBatch {
 public:
  // Memory is taken in units of `slab_nbytes`, at least 1.
  explicit AppendBatch(std::size_t slab_nbytes, StagingPool& pool = StagingPool::instance())
      : slab_nbytes_(slab_nbytes), pool_(pool) {}

  // Adds the records data/<first_number>, ... With `copy`, they keep the present values; an
  // accelerator's storage is copied on this thread's current stream, without waiting.  Without
  // `copy`, the storages must not change until the batch is written.  With `element`, returns the
  // statistics of a single storage that is copied in CPU memory.  Throws std::invalid_argument for
  // a storage without memory; after an error the batch is unchanged.
  std::optional<Statistics> add(const StorageList& storages, std::uint32_t first_number, bool copy,
                                std::size_t n_threads, std::optional<Element> element = {});
  // Ends a group: the records since the previous group, and the part of a pickle that names them.
  void end_group(std::string_view part);

  bool is_staged() const { return !stagers_.empty(); }

  std::size_t n_groups() const { return groups_.size(); }
  // The number of first groups that together have at most `nbytes` bytes.
  std::size_t n_groups_within(std::uint64_t nbytes) const;

  // The place of a journal's parts in the file.
  struct Parts {
    std::uint64_t offset;
    std::uint64_t nbytes;
  };

  // Appends the first groups, and behind their records the record `journal_name`: the pickle of a
  // dict with the groups' parts.
  Parts write(AppendedArchive& archive, const std::string& journal_name, std::size_t n_groups,
              bool direct, WriteOptions options, const Poll& poll);
  void release();
  // Replaces release() in a forked child, which must not touch memory of accelerators.
  void abandon();

 private:
  struct Piece {
    std::byte* target;
    const std::byte* source;
    std::size_t nbytes;
  };
  // The counts at the end of a group.
  struct Group {
    std::size_t n_records;
    std::size_t pickle_nbytes;
  };
  class GroupedStager;
  using Stagers = std::vector<std::unique_ptr<Stager>>;

  std::byte* reserve(std::size_t nbytes);
  static void copy_pieces(const std::vector<Piece>& pieces, std::size_t n_threads);
  static c10::Storage copy_on_device(const c10::Storage& storage);

  const std::size_t slab_nbytes_;
  StagingPool& pool_;
  std::vector<StagingBlock> slabs_;
  std::size_t slab_used_ = 0;  // of the last slab
  std::vector<RecordSpec> records_;
  std::vector<const std::byte*> payloads_;
  std::vector<c10::Storage> kept_;
  Stagers stagers_;
  std::string pickle_{kDictHead};
  std::vector<Group> groups_;
};

}  // namespace ptsave
