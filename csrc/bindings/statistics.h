// Converts statistics of tensors to Python objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <cstddef>

#include "core/statistics/statistics.h"

namespace ptsave {

// Taking the GIL back can take longer than reading this many bytes.
inline constexpr std::size_t kNbytesWithGil = std::size_t{64} << 10;

// A contiguous tensor in CPU memory; else TypeError, or RuntimeError if its storage was freed.
at::Tensor unpack_measurable(const pybind11::handle& object);

// The fields of capturing.schema.Statistics, in order.
pybind11::tuple fields_of(const Statistics& found, c10::ScalarType type);

// Whether a contiguous tensor's elements are all bytes of the storage, in CPU memory.
bool is_storage(const at::Tensor& tensor, const c10::Storage& storage);

}  // namespace ptsave
