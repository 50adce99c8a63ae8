// Adds storages to the records of an archive to write.
#pragma once

#include <memory>
#include <vector>

#include "core/write/file_plan.h"
#include "device/accelerator_stager.h"
#include "storage/storage.h"

namespace ptsave {

// Adds the records data/0, data/1, ..., which keep their storages alive.  Adds storages on
// accelerators also to `on_accelerators`, by record.
void add_storages(const StorageList& list, PlannedRecords& records,
                  AcceleratorStager::Sources& on_accelerators);

}  // namespace ptsave
