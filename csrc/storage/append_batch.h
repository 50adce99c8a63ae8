// Records that are appended to an archive together, and the copies of their storages.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory/staging_pool.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"
#include "core/statistics/statistics.h"
#include "core/write/appended_archive.h"
#include "device/accelerator_stager.h"
#include "storage/storage.h"

namespace ptsave {

// A pickle of a dict is this, an empty one in protocol 2 and its number in the memo, then parts
// that add entries to it, and the full stop.
inline constexpr std::string_view kDictHead{"\x80\x02}q\x00", 5};
inline constexpr char kStop = '.';

// Copies lie one behind the other in slabs of one size, so that the pool always has one of those
// that came back to it, whatever the sizes of the storages are.  One thread at a time.
class AppendBatch {
 public:
  // `slab_nbytes`, at least 1, is the unit in which memory is taken.
  explicit AppendBatch(std::size_t slab_nbytes, StagingPool& pool = StagingPool::instance())
      : slab_nbytes_(slab_nbytes), pool_(pool) {}

  // Adds the records data/<first_number>, ...  With `copy` their values are those of now: on
  // accelerators, those that the current streams of this thread leave there, and nobody waits for
  // them.  Otherwise they are not to change until the batch is written.  std::invalid_argument for
  // a storage without memory.  After an error the batch is as before.  With an `element` the
  // statistics of a single storage are taken beside its copy, if one is made in CPU memory.
  std::optional<Statistics> add(const StorageList& storages, std::uint32_t first_number, bool copy,
                                std::size_t n_threads, std::optional<Element> element = {});
  // Ends a group: the records since the last one, and the part of a pickle that names them.
  void end_group(std::string_view part);

  bool is_staged() const { return !stagers_.empty(); }

  std::size_t n_groups() const { return groups_.size(); }
  // How many of the first groups have no more than this many bytes of records.
  std::size_t n_groups_within(std::uint64_t nbytes) const;

  // A place in a file.
  struct Parts {
    std::uint64_t offset;
    std::uint64_t nbytes;
  };

  // Appends the first groups, and behind their records one of this name: the pickle of a dict with
  // their parts.  Returns where these are.
  Parts write(AppendedArchive& archive, const std::string& journal_name, std::size_t n_groups,
              bool direct, WriteOptions options, const Poll& poll);
  void release();
  // In a forked child, instead of release(): memory of accelerators must not be touched there.
  void abandon();

 private:
  struct Piece {
    std::byte* target;
    const std::byte* source;
    std::size_t nbytes;
  };
  // What had been added when it ended.
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
  std::size_t slab_used_ = 0;  // of the last one
  std::vector<RecordSpec> records_;
  std::vector<const std::byte*> payloads_;
  std::vector<c10::Storage> kept_;
  Stagers stagers_;
  std::string pickle_{kDictHead};
  std::vector<Group> groups_;
};

}  // namespace ptsave
