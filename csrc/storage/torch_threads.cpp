#include "storage/torch_threads.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <cstdint>

namespace ptsave {

// Uses a TensorIterator, which calls at::parallel_for inside torch, because that template would
// have to be compiled with torch's OpenMP.  The iterated tensor has one dummy byte for each run.
void share_out(std::size_t n, std::size_t n_threads, const std::function<void(std::size_t)>& work) {
  const std::size_t n_runs = std::min(n, n_threads);
  if (n_runs < 2) {
    for (std::size_t i = 0; i < n; ++i) work(i);
    return;
  }
  at::TensorBase runs =
      at::detail::empty_cpu({static_cast<std::int64_t>(n_runs)}, c10::ScalarType::Byte);
  const auto* const first = static_cast<const char*>(runs.const_data_ptr());
  at::TensorIterator iterator = at::TensorIterator::nullary_op(runs);
  iterator.for_each(
      // There is one dimension: the last argument, the size of a second one, is 1.
      [&](char** data, const std::int64_t* /*strides*/, std::int64_t n_taken, std::int64_t) {
        const auto run = static_cast<std::size_t>(data[0] - first);
        const std::size_t end = (run + static_cast<std::size_t>(n_taken)) * n / n_runs;
        for (std::size_t i = run * n / n_runs; i < end; ++i) work(i);
      },
      /*grain_size=*/1);
}

}  // namespace ptsave
