#include "storage/planned_storages.h"

#include <cstddef>
#include <string>
#include <utility>

namespace ptsave {

void add_storages(const StorageList& list, PlannedRecords& records,
                  AcceleratorStager::Sources& on_accelerators) {
  const std::size_t first = records.size();
  constexpr std::size_t kOthers = 16;  // usually fewer records follow the storages
  records.reserve(first + list.storages.size() + kOthers);
  auto in_memory = std::make_shared<std::vector<c10::Storage>>();
  in_memory->reserve(list.storages.size());
  for (std::size_t i = 0; i < list.storages.size(); ++i) {
    const c10::Storage& storage = list.storages[i];
    std::string name = "data/" + std::to_string(i);
    if (storage.device().is_cpu()) {
      records.add(std::move(name), storage.nbytes(), static_cast<const std::byte*>(storage.data()));
      in_memory->push_back(storage);
    } else {
      records.add_staged(std::move(name), storage.nbytes());
      if (storage.nbytes() == 0) continue;
      on_accelerators.emplace(first + i, AcceleratorStager::Source{storage, 0, storage.nbytes()});
    }
  }
  records.keep(std::move(in_memory));
}

}  // namespace ptsave
