// Statistics of tensors as Python's objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <cstddef>

#include "core/statistics/statistics.h"

namespace ptsave {

// To take the GIL back can take longer than to read this much.
inline constexpr std::size_t kNbytesWithGil = std::size_t{64} << 10;

// A contiguous tensor in CPU memory that has its memory.  TypeError, RuntimeError.
at::Tensor unpack_measurable(const pybind11::handle& object);

// The fields of tree.capture_schema.Statistics.
pybind11::tuple fields_of(const Statistics& found, c10::ScalarType type);

// Whether the elements of a tensor, one after the other, are all bytes of a storage in CPU memory.
bool is_storage(const at::Tensor& tensor, const c10::Storage& storage);

}  // namespace ptsave
