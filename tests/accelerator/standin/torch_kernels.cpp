// Torch's part of the stand-in: poisons what torch's allocator frees, and computes on the CPU what
// tests compute on devices.  Copies that need no kernel stay torch's own.
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Copy.h>
#include <ATen/native/Fill.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <utility>

#include "../backend/memory.h"
#include "../backend/view.h"
#include "standin.h"

// Views are those of the fake accelerator; only addresses differ.
std::byte* fake::accessible(const void* address) { return standin::accessible(address); }

namespace {

using c10::CachingDeviceAllocator::TraceEntry;

// Queues a kernel on the current stream of a device.
template <class Kernel>
void launch(at::Device device, Kernel kernel) {
  const c10::cuda::CUDAGuard guard(device);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  standin::enqueue_kernel(stream.stream(), device.index(), std::move(kernel));
}

void fill(at::TensorIterator& iterator, const c10::Scalar& value) {
  const at::Tensor& tensor = iterator.tensor(0);
  launch(tensor.device(),
         [view = fake::View(tensor), value] { view.as_cpu_tensor().fill_(value); });
}

at::native::copy_fn copy_of_torch = nullptr;

void copy(at::TensorIterator& iterator, bool non_blocking) {
  const at::Tensor& to = iterator.tensor(0);
  const at::Tensor& from = iterator.tensor(1);
  const bool needs_kernel = to.dtype() != from.dtype() || to.is_conj() != from.is_conj() ||
                            to.is_neg() != from.is_neg() || !iterator.is_contiguous();
  if (to.device() != from.device() || !needs_kernel) return copy_of_torch(iterator, non_blocking);
  const fake::ViewPair pair(fake::View(to), fake::View(from.expand_as(to)));
  launch(to.device(), [pair] { fake::copy(pair); });
}

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const standin::Uncounted kernel;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// The fallback calls this for what it has computed in place.
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return to.copy_(from);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  for (const char* name :
       {"add.Tensor", "add_.Tensor", "arange.start_out", "count_nonzero.dim_IntList", "eq.Scalar",
        "eq.Tensor", "equal", "relu", "sum", "sum.dim_IntList", "threshold_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
  }
}

}  // namespace

// To be called once, after torch has initialized CUDA.
extern "C" STANDIN_API void standin_install() {
  at::native::fill_stub.set_cuda_dispatch_ptr(&fill);
  // A stub does not tell its function, but that is in its only member.
  auto& stub = reinterpret_cast<at::native::DispatchStubImpl&>(at::native::copy_stub);
  copy_of_torch = reinterpret_cast<at::native::copy_fn>(stub.cuda_dispatch_ptr);
  at::native::copy_stub.set_cuda_dispatch_ptr(&copy);
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& entry) {
    if (entry.action_ != TraceEntry::FREE_COMPLETED) return;
    const auto* address = reinterpret_cast<const void*>(entry.addr_);
    standin::enqueue_poison(entry.stream_, entry.device_, address, entry.size_);
  });
}
