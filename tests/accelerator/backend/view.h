// Tensors as operations on streams see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fake {

// A tensor's memory at addresses that can be touched.  It keeps nothing alive: whether the memory
// is still the tensor's when an operation runs is up to allocators and their users, as with CUDA.
class View {
 public:
  explicit View(const at::Tensor& tensor);

  at::Tensor as_cpu_tensor() const;
  std::size_t nbytes() const;
  // Whether `other` has the same elements in the same bytes.
  bool has_layout_of(const View& other) const;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  at::ScalarType dtype_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  std::int64_t numel_;
  bool is_contiguous_;
  bool is_conj_;
  bool is_neg_;
};

// Destination and source, of the same sizes.
using ViewPair = std::pair<View, View>;
void copy(const ViewPair& pair);

}  // namespace fake
