// Blocks of tensors in files, row by row, for resharding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/io/ranges.h"

namespace ptsave {

// The place of a CPU tensor's elements in a file: the first at `offset`, and strides in bytes.
struct TensorBox {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::vector<std::uint64_t> strides;
  at::Tensor target;
};

// Adds the runs of bytes that are contiguous in both file and target.  Throws std::invalid_argument
// unless there is one stride for each dimension.
void add_ranges(const TensorBox& box, std::vector<FileRange>& ranges);

}  // namespace ptsave
