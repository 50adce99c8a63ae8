// Copies between hosts and devices, what they count, and how tests make them fail.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "context.h"

namespace fake {

// copy_() between tensors of which at least one is on a device.
void copy_between(const at::Tensor& destination, const at::Tensor& source, bool non_blocking);

// A copy on the CPU of a device's tensor, by the current stream.  Not one of the counted copies.
at::Tensor cpu_copy_of(const at::Tensor& tensor);

// Copies of this thread are neither counted nor made to fail: they stand for a kernel.
class CopiesOfKernel : Fixed {
 public:
  CopiesOfKernel();
  ~CopiesOfKernel();
};

struct Counts {
  std::map<std::string, std::vector<std::size_t>> copies;  // "h2d", "d2h", "d2d": their sizes
  // Kernels ("cat", "foreach_copy"), "events" made, "streams" handed out, and "busy_waits": those
  // for which CUDA would have kept a core busy.
  std::map<std::string, std::int64_t> others;
};

void count(const std::string& name);
Counts counts();
void reset_counts();

// `after` copies succeed, the next one fails: when it is queued, or when its stream runs it.
void fail_copy(std::int64_t after, bool asynchronous);
void fail_no_copy();

}  // namespace fake
