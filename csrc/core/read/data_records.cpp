#include "core/read/data_records.h"

#include <algorithm>
#include <string>

namespace ptsave {
namespace {

constexpr std::string_view kFolder = "data/";

}  // namespace

DataRecords::DataRecords(const ArchiveIndex& index) : index_(index) {
  for (std::size_t i = 0; i < index.records().size(); ++i) {
    const bool is_storage = index.records()[i].name.starts_with(kFolder);
    (is_storage ? storages_ : others_).push_back(i);
  }
}

bool DataRecords::have_crcs() const {
  const auto is_filled = [&](std::size_t i) { return index_.records()[i].nbytes > 0; };
  const auto has_crc = [&](std::size_t i) { return is_filled(i) && index_.records()[i].crc != 0; };
  return std::ranges::any_of(storages_, has_crc) || std::ranges::none_of(storages_, is_filled);
}

std::size_t DataRecords::find(std::string_view key) {
  const auto records = index_.records();
  if (++last_found_ < records.size()) {
    const std::string_view next = records[last_found_].name;
    if (next.starts_with(kFolder) && next.substr(kFolder.size()) == key) return last_found_;
  }
  return last_found_ = index_.find(std::string(kFolder).append(key));
}

}  // namespace ptsave
