// What the stand-in offers besides calls of CUDA: to tests, by control.py, and to
// torch_kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#define STANDIN_API __attribute__((visibility("default")))

namespace standin {

// The address at which an operation on a stream reaches what is at a device's address.
STANDIN_API std::byte* accessible(const void* address);
// Streams are given by handle; the handle of a default stream is null.
STANDIN_API void enqueue_kernel(void* stream, int device, std::function<void()> kernel);
STANDIN_API void enqueue_poison(void* stream, int device, const void* address, std::size_t nbytes);
STANDIN_API void set_counting(bool counts);

// Calls of a thread that has such an object are neither counted nor made to fail: they stand for a
// kernel.
class Uncounted {
 public:
  Uncounted() { set_counting(false); }
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
  ~Uncounted() { set_counting(true); }
};

}  // namespace standin

extern "C" {

// Counts and contexts since the last reset, as lines of a name and a number.
STANDIN_API const char* standin_report();
STANDIN_API void standin_reset();
STANDIN_API void standin_forget_contexts();
STANDIN_API std::int64_t standin_in_flight();
// `after` such calls succeed, then one fails (extent 0), or all of this name (1), or all calls (2).
STANDIN_API void standin_fail(const char* call, std::int64_t after, int error, int extent,
                              int is_late);
STANDIN_API void standin_set_default_delay(std::int64_t min_us, std::int64_t max_us);
STANDIN_API void standin_set_delay(void* stream, int device, std::int64_t min_us,
                                   std::int64_t max_us);
STANDIN_API void standin_set_held(void* stream, int device, int held);
STANDIN_API void standin_set_capturing(void* stream, int device, int capturing);
STANDIN_API std::int64_t standin_n_captured(void* stream, int device);
}
