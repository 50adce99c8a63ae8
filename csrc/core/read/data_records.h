// Separates the records of an archive that hold storages, data/<key>, from all others.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "core/format/archive.h"

namespace ptsave {

// Not for concurrent use.
class DataRecords {
 public:
  // `index` must outlive it.
  explicit DataRecords(const ArchiveIndex& index);

  // Numbers of records, in the index's order.
  const std::vector<std::size_t>& storages() const { return storages_; }
  const std::vector<std::size_t>& others() const { return others_; }
  // Whether storages can be verified: torch writes either all storages' CRCs or zero for all.
  bool have_crcs() const;
  // The record data/<key>, or ArchiveIndex::kNotFound.  Fast for keys in the records' order, as in
  // most pickles.
  std::size_t find(std::string_view key);

 private:
  const ArchiveIndex& index_;
  std::vector<std::size_t> storages_;
  std::vector<std::size_t> others_;
  std::size_t last_found_ = ArchiveIndex::kNotFound;
};

}  // namespace ptsave
