// Statistics of tensors in CPU memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>

#include "core/statistics/statistics.h"

namespace ptsave {

// Nothing for a dtype whose elements are no numbers (quantized ones, bits).  Those of fewer bits
// than a byte (uint1 ... int7) are taken for bytes.
std::optional<Element> element_of(c10::ScalarType type);

// Of a contiguous tensor in CPU memory, of a dtype with an Element, by up to `n_threads` of torch's
// threads.
Statistics statistics_of(const at::Tensor& tensor, std::size_t n_threads);
// The same, beside a copy of the bytes.
Statistics copy_with_statistics(Element element, std::byte* target, const std::byte* source,
                                std::size_t nbytes, std::size_t n_threads);

}  // namespace ptsave
