// Launches.  Two kernels of torch are emulated, which ptsave's copies launch: the gathering of
// contiguous tensors by cat, and the scattering by _foreach_copy_.  Their parameters have the
// layout that torch gives them for CUDA 13.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "memory.h"
#include "state.h"
#include "stream.h"

#define STANDIN_API extern "C" __attribute__((visibility("default")))

namespace standin {
namespace {

// The work of a kernel: copies.
struct Part {
  std::byte* to;
  const std::byte* from;
  std::size_t nbytes;
};
using Parts = std::vector<Part>;

struct Kernel {
  std::string name;
  std::string emulation;  // "cat", "foreach_copy", or empty
  std::size_t itemsize = 0;
  std::size_t n_tensors = 0;  // the capacity of its parameters
};

std::mutex mutex;
std::map<const void*, std::string>& mangled_names() {
  static auto& instance = *new std::map<const void*, std::string>;
  return instance;
}

Kernel kernel_of(const std::string& mangled) {
  Kernel kernel;
  char* const demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, nullptr);
  kernel.name = demangled != nullptr ? demangled : mangled;
  std::free(demangled);
  static const std::regex cat(
      R"(CatArrayBatchedCopy\w*<.*?OpaqueType<(\d+)u?>, unsigned int, 1, (\d+),)");
  static const std::regex foreach_copy(
      R"(multi_tensor_apply_kernel<.*?TensorListMetadata<2>.*?::Copy<([\w ]+), \1>)");
  static const std::map<std::string, std::size_t> sizes = {
      {"unsigned char", 1}, {"float", 4}, {"long", 8}};
  std::smatch found;
  if (std::regex_search(kernel.name, found, cat)) {
    kernel.emulation = "cat";
    kernel.itemsize = std::stoul(found[1]);
    kernel.n_tensors = std::stoul(found[2]);
  } else if (std::regex_search(kernel.name, found, foreach_copy) && sizes.contains(found[1])) {
    kernel.emulation = "foreach_copy";
    kernel.itemsize = sizes.at(found[1]);
  }
  return kernel;
}

const Kernel& kernel_at(const void* function) {
  static auto& kernels = *new std::map<const void*, Kernel>;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = kernels.try_emplace(function);
  if (is_new) found->second = kernel_of(mangled_names()[function]);
  return found->second;
}

// CatArrInputTensorMetadata holds arrays of addresses, offsets, sizes in the dimension, and numbers
// of elements.
Parts parts_of_cat(const Kernel& kernel, dim3 grid, void** arguments) {
  auto* out = *static_cast<std::byte**>(arguments[0]);
  auto* inputs = static_cast<const std::byte* const*>(arguments[1]);
  const auto* offsets = reinterpret_cast<const std::uint32_t*>(inputs + kernel.n_tensors);
  const std::uint32_t* numels = offsets + 2 * kernel.n_tensors;
  Parts parts;
  for (std::size_t i = 0; i < grid.y; ++i) {
    parts.push_back({out + offsets[i] * kernel.itemsize, inputs[i], numels[i] * kernel.itemsize});
  }
  return parts;
}

// TensorListMetadata<2>.
struct ForeachTensors {
  static constexpr std::size_t kTensors = 448;
  static constexpr std::size_t kBlocks = 2240;
  static constexpr std::int64_t kChunk = 65536;  // elements of a block

  std::byte* from[kTensors];
  std::byte* to[kTensors];
  std::int64_t numel[kTensors];
  std::uint16_t tensor_of_block[kBlocks];
  std::int32_t chunk_of_block[kBlocks];
};

Parts parts_of_foreach_copy(const Kernel& kernel, dim3 grid, void** arguments) {
  const auto& tensors = *static_cast<const ForeachTensors*>(arguments[0]);
  Parts parts;
  for (std::size_t block = 0; block < grid.x; ++block) {
    const std::size_t i = tensors.tensor_of_block[block];
    const std::int64_t begin = tensors.chunk_of_block[block] * ForeachTensors::kChunk;
    const std::int64_t n = std::min(ForeachTensors::kChunk, tensors.numel[i] - begin);
    const std::size_t offset = static_cast<std::size_t>(begin) * kernel.itemsize;
    parts.push_back({tensors.to[i] + offset, tensors.from[i] + offset,
                     static_cast<std::size_t>(n) * kernel.itemsize});
  }
  return parts;
}

cudaError_t launch(const void* function, dim3 grid, void** arguments, cudaStream_t handle) {
  return call_there("cudaLaunchKernel", [&] {
    Stream& stream = stream_of(handle);
    if (stream.device() != current_device) return cudaErrorInvalidResourceHandle;
    const Kernel& kernel = kernel_at(function);
    if (kernel.emulation.empty()) {
      state().count_missing(kernel.name);
      return cudaErrorNoKernelImageForDevice;
    }
    Parts parts = kernel.emulation == "cat" ? parts_of_cat(kernel, grid, arguments)
                                            : parts_of_foreach_copy(kernel, grid, arguments);
    std::erase_if(parts, [](const Part& part) { return part.nbytes == 0; });
    for (Part& part : parts) {
      const Place to = place_of(part.to, part.nbytes);
      const Place from = place_of(part.from, part.nbytes);
      if (to.device != current_device || from.device != current_device || to.data == nullptr ||
          from.data == nullptr) {
        return cudaErrorIllegalAddress;
      }
      part = {to.data, from.data, part.nbytes};
    }
    state().count(kernel.emulation);
    stream.submit([parts = std::move(parts)] {
      for (const Part& part : parts) std::memcpy(part.to, part.from, part.nbytes);
    });
    return cudaSuccess;
  });
}

}  // namespace
}  // namespace standin

using namespace standin;

// The host's part of a program registers its kernels before main(), or when it is loaded.
STANDIN_API void __cudaRegisterFunction(void** /*module*/, const char* function, char* /*device*/,
                                        const char* name, int /*limit*/, void*, void*, void*, void*,
                                        int*) {
  // As the runtime does: it ends before the objects that are older than its user.
  static const int has_exit = std::atexit([] { state().end(); });
  static_cast<void>(has_exit);
  const std::lock_guard lock(mutex);
  mangled_names()[function] = name;
}

STANDIN_API cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return cudaSuccess;
}

STANDIN_API cudaError_t __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 /*block*/,
                                           void** arguments, std::size_t /*shared*/,
                                           cudaStream_t stream) {
  return launch(kernel, grid, arguments, stream);
}

STANDIN_API cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 /*block*/,
                                         void** arguments, std::size_t /*shared*/,
                                         cudaStream_t stream) {
  return launch(kernel, grid, arguments, stream);
}

STANDIN_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                            const void* kernel, void** arguments) {
  return launch(kernel, configuration->gridDim, arguments, configuration->stream);
}
