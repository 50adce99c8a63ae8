// Statistics of tensors in CPU memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>

#include "core/statistics/statistics.h"

namespace ptsave {

// Nothing for a dtype whose elements are no numbers (quantized, bits).  Elements smaller than a
// byte (uint1 ... int7) count as bytes.
std::optional<Element> element_of(c10::ScalarType type);

// The statistics of a contiguous CPU tensor with an Element, by up to `n_threads` torch threads.
Statistics statistics_of(const at::Tensor& tensor, std::size_t n_threads);
// The same while copying the bytes to `target`.
Statistics copy_with_statistics(Element element, std::byte* target, const std::byte* source,
                                std::size_t nbytes, std::size_t n_threads);

}  // namespace ptsave
