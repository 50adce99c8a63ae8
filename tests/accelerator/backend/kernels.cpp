// Values: copies, the asynchronous kernels that gather and scatter, and the CPU for everything
// else.
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "copy.h"
#include "memory.h"
#include "shape.h"
#include "stream.h"
#include "view.h"

namespace fake {
namespace {

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  copy_between(dst, self, non_blocking);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  copy_between(dst, self, false);
  return dst;
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return cpu_copy_of(self).item(); }

// One operation on the current stream of `device`.
void enqueue_copies(at::Device device, std::vector<ViewPair> pairs) {
  const OnDevice on_device(device.index());
  enqueue(current_stream(device.index()),
          [pairs = std::move(pairs)] { std::for_each(pairs.begin(), pairs.end(), copy); });
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  const OnDevice on_device(self.device().index());
  enqueue(current_stream(self.device().index()),
          [view = View(self), value] { view.as_cpu_tensor().fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// What cat() has always left out.
bool is_skipped(const at::Tensor& tensor) { return tensor.dim() == 1 && tensor.size(0) == 0; }

std::vector<at::Tensor> parts_of_cat(const at::ITensorListRef& tensors) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(parts.empty() || tensor.device() == parts.front().device(),
                "fake: cat() of tensors on ", parts.front().device(), " and ", tensor.device());
    parts.push_back(tensor);
  }
  TORCH_CHECK(!parts.empty(), "fake: cat() of no tensors");
  return parts;
}

std::vector<std::int64_t> size_of_cat(const std::vector<at::Tensor>& parts, std::int64_t dim) {
  std::vector<std::int64_t> size = parts.front().sizes().vec();
  for (std::size_t i = 1; i < parts.size(); ++i) {
    for (std::size_t axis = 0; axis < size.size(); ++axis) {
      TORCH_CHECK(parts[i].dim() == parts.front().dim() &&
                      (std::cmp_equal(axis, dim) || parts[i].sizes()[axis] == size[axis]),
                  "fake: cat() of tensors of sizes ", parts.front().sizes(), " and ",
                  parts[i].sizes());
    }
    size[static_cast<std::size_t>(dim)] += parts[i].size(dim);
  }
  return size;
}

void cat_into(const at::Tensor& out, std::vector<at::Tensor> parts, std::int64_t dim) {
  count("cat");
  std::erase_if(parts, is_skipped);
  if (parts.empty()) {
    at::native::resize_output(out, {0});
    return;
  }
  dim = c10::maybe_wrap_dim(dim, parts.front().dim());
  at::native::resize_output(out, size_of_cat(parts, dim));
  std::vector<ViewPair> pairs;
  std::int64_t offset = 0;
  for (const at::Tensor& part : parts) {
    TORCH_CHECK(part.device() == out.device(), "fake: cat() from ", part.device(), " to ",
                out.device());
    pairs.emplace_back(View(out.narrow(dim, offset, part.size(dim))), View(part));
    offset += part.size(dim);
  }
  enqueue_copies(out.device(), std::move(pairs));
}

at::Tensor& cat_out(const at::ITensorListRef& tensors, std::int64_t dim, at::Tensor& out) {
  cat_into(out, parts_of_cat(tensors), dim);
  return out;
}

void foreach_copy(at::TensorList self, at::TensorList src, bool non_blocking) {
  const bool on_one_device =
      self.size() == src.size() && !self.empty() &&
      std::equal(self.begin(), self.end(), src.begin(), [&](const auto& to, const auto& from) {
        return to.device() == self.front().device() && from.device() == to.device();
      });
  if (!on_one_device) {  // as CUDA: one copy after the other
    at::native::foreach_tensor_copy_list_kernel_slow_(self, src, non_blocking);
    return;
  }
  count("foreach_copy");
  std::vector<ViewPair> pairs;
  pairs.reserve(self.size());
  for (std::size_t i = 0; i < self.size(); ++i) {
    pairs.emplace_back(View(self[i]), View(src[i].expand_as(self[i])));
  }
  enqueue_copies(self.front().device(), std::move(pairs));
}

// Ordered with the current stream alone, as a kernel would be: the device is not synchronized,
// which would hide that somebody has not waited for another stream.
void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const CopiesOfKernel kernel;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("fill_.Scalar", TORCH_FN(fill));
  library.impl("zero_", TORCH_FN(zero));
  library.impl("cat.out", TORCH_FN(cat_out));
  library.impl("_foreach_copy_", TORCH_FN(foreach_copy));
}

// A view knows both bits; torch would copy the source first, which ends up here again.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

}  // namespace
}  // namespace fake
