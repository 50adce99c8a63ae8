#include "storage/tensor_boxes.h"

#include <stdexcept>

namespace ptsave {

void add_ranges(const TensorBox& box, std::vector<FileRange>& ranges) {
  const at::Tensor& target = box.target;
  const auto sizes = target.sizes();
  if (box.strides.size() != sizes.size()) throw std::invalid_argument("one stride a dimension");
  if (target.numel() == 0) return;
  const auto itemsize = static_cast<std::uint64_t>(target.element_size());
  const auto place_stride = [&](std::size_t d) {
    return static_cast<std::int64_t>(itemsize) * target.stride(static_cast<std::int64_t>(d));
  };
  std::uint64_t run = itemsize;
  std::size_t n_outer = sizes.size();
  for (; n_outer > 0; --n_outer) {
    const std::size_t d = n_outer - 1;
    const bool is_packed =
        box.strides[d] == run && place_stride(d) == static_cast<std::int64_t>(run);
    if (sizes[d] != 1 && !is_packed) break;
    run *= static_cast<std::uint64_t>(sizes[d]);
  }
  std::uint64_t offset = box.offset;
  auto* place = static_cast<std::byte*>(target.mutable_data_ptr());
  std::vector<std::int64_t> index(n_outer);
  for (;;) {
    ranges.push_back({box.file, offset, run, place});
    std::size_t d = n_outer;
    for (; d > 0; --d) {
      const std::size_t k = d - 1;
      offset += box.strides[k];
      place += place_stride(k);
      if (++index[k] < sizes[k]) break;
      offset -= box.strides[k] * static_cast<std::uint64_t>(index[k]);
      place -= place_stride(k) * index[k];
      index[k] = 0;
    }
    if (d == 0) return;
  }
}

}  // namespace ptsave
