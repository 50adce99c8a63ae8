#include "device/bytes.h"

#include <c10/core/TensorOptions.h>

namespace ptsave {

at::Tensor bytes_of(const c10::Storage& storage, std::uint64_t offset, std::uint64_t nbytes) {
  const c10::DispatchKey key = c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device());
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), caffe2::TypeMeta::Make<std::uint8_t>());
  c10::TensorImpl* const impl = bytes.unsafeGetTensorImpl();
  impl->set_sizes_contiguous({static_cast<std::int64_t>(nbytes)});
  impl->set_storage_offset(static_cast<std::int64_t>(offset));
  return bytes;
}

at::Tensor bytes_of(const at::Tensor& tensor, std::uint64_t offset, std::uint64_t nbytes) {
  return bytes_of(tensor.storage(), byte_offset(tensor) + offset, nbytes);
}

std::uint64_t byte_offset(const at::Tensor& tensor) {
  return static_cast<std::uint64_t>(tensor.storage_offset()) * tensor.itemsize();
}

}  // namespace ptsave
