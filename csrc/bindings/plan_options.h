// ptsave._C.WriteOptions.
#pragma once

#include <cstddef>

#include "core/writer.h"

namespace ptsave {

// How to write, and how much page-locked memory that may take.
struct PlanOptions : WriteOptions {
  std::size_t max_pinned_nbytes = 0;
};

}  // namespace ptsave
