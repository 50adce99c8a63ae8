// Views of memory as tensors of bytes, because ATen copies tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace ptsave {

// A uint8 tensor that views a part of a storage.
at::Tensor bytes_of(const c10::Storage& storage, std::uint64_t offset, std::uint64_t nbytes);

// The same over a part of a contiguous tensor.
at::Tensor bytes_of(const at::Tensor& tensor, std::uint64_t offset, std::uint64_t nbytes);

// The offset of a tensor's elements in its storage, in bytes.
std::uint64_t byte_offset(const at::Tensor& tensor);

}  // namespace ptsave
