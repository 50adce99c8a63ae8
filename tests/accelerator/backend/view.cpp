#include "view.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

#include "memory.h"

namespace fake {

View::View(const at::Tensor& tensor)
    : dtype_(tensor.scalar_type()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      numel_(tensor.numel()),
      is_contiguous_(tensor.is_contiguous()),
      is_conj_(tensor.is_conj()),
      is_neg_(tensor.is_neg()) {
  if (numel_ > 0) {
    void* address = tensor.data_ptr();
    data_ = tensor.is_cpu() ? static_cast<std::byte*>(address) : accessible(address);
  }
}

at::Tensor View::as_cpu_tensor() const {
  at::Tensor tensor = at::from_blob(data_, sizes_, strides_, at::TensorOptions(dtype_));
  if (is_conj_) {
    tensor = tensor.conj();
  }
  return is_neg_ ? tensor._neg_view() : tensor;
}

std::size_t View::nbytes() const {
  return static_cast<std::size_t>(numel_) * c10::elementSize(dtype_);
}

bool View::has_layout_of(const View& other) const {
  return dtype_ == other.dtype_ && is_conj_ == other.is_conj_ && is_neg_ == other.is_neg_ &&
         is_contiguous_ && other.is_contiguous_;
}

void copy(const ViewPair& pair) {
  const auto& [destination, source] = pair;
  if (destination.nbytes() == 0) {
    return;
  }
  if (destination.has_layout_of(source)) {
    std::memmove(destination.data(), source.data(), destination.nbytes());
  } else {
    destination.as_cpu_tensor().copy_(source.as_cpu_tensor());
  }
}

}  // namespace fake
