// Blocks of tensors in files, row by row: what resharding wants of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/io/range_list.h"

namespace ptsave {

// All elements of `target`, in CPU memory, as they lie in a file: from `offset` on, and the next
// one of each dimension so many bytes further.
struct TensorBox {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::vector<std::uint64_t> strides;
  at::Tensor target;
};

// The runs of bytes that are next to each other in both.  std::invalid_argument for strides that
// are not of the target's dimensions.
void add_ranges(const TensorBox& box, std::vector<FileRange>& ranges);

}  // namespace ptsave
