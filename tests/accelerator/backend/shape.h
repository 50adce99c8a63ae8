// What has to do with sizes, strides and storages, but not with values.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <optional>

namespace fake {

void resize_storage(c10::StorageImpl& storage, std::size_t nbytes);

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> memory_format);

}  // namespace fake
