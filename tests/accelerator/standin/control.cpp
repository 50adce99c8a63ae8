#include <cuda.h>
#include <pthread.h>

#include <cstring>
#include <string>
#include <utility>

#include "memory.h"
#include "standin.h"
#include "state.h"
#include "stream.h"

namespace standin {
namespace {

Stream& stream_at(void* handle, int device) {
  return stream_of(static_cast<cudaStream_t>(handle), device);
}

[[gnu::constructor]] void watch_forks() {
  pthread_atfork([] { state().lock_for_fork(); }, [] { state().unlock_after_fork(); },
                 [] { state().renew_in_child(); });
}

}  // namespace

std::byte* accessible(const void* address) { return place_of(address, 1).data; }

void enqueue_kernel(void* stream, int device, std::function<void()> kernel) {
  stream_at(stream, device).submit(std::move(kernel));
}

void enqueue_poison(void* stream, int device, const void* address, std::size_t nbytes) {
  if (state().is_forked_child()) return;
  const Place place = place_of(address, nbytes);
  if (!place.is(Place::kDevice)) return;
  stream_at(stream, device).enqueue_poison([=] {
    std::memset(place.data, simulated::kPoison, nbytes);
  });
}

void set_counting(bool counts) { is_counting = counts; }

}  // namespace standin

using namespace standin;

const char* standin_report() {
  static auto& text = *new std::string;
  text = state().report();
  return text.c_str();
}

void standin_reset() {
  standin_set_default_delay(0, 300);
  for (Stream* stream : streams().all()) stream->release();
  for (int device = 0; device < kDevices; ++device) streams().drain(device);
  state().reset();
}

void standin_forget_contexts() { state().forget_contexts(); }

std::int64_t standin_in_flight() { return simulated::operations_in_flight; }

void standin_fail(const char* call, std::int64_t after, int error, int extent, int is_late) {
  state().plan({call, after, static_cast<cudaError_t>(error), static_cast<Failure::Extent>(extent),
                is_late != 0});
}

void standin_set_default_delay(std::int64_t min_us, std::int64_t max_us) {
  simulated::default_min_us = min_us;
  simulated::default_max_us = max_us;
}

void standin_set_delay(void* stream, int device, std::int64_t min_us, std::int64_t max_us) {
  stream_at(stream, device).set_delay({min_us, max_us});
}

void standin_set_held(void* stream, int device, int held) {
  stream_at(stream, device).set_held(held != 0);
}

void standin_set_capturing(void* stream, int device, int capturing) {
  stream_at(stream, device).set_capturing(capturing != 0);
}

std::int64_t standin_n_captured(void* stream, int device) {
  return stream_at(stream, device).n_captured();
}

// The one call of the driver that torch makes: by dlopen() of libcuda.so.1, which is this library.
extern "C" STANDIN_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags,
                                                           int* is_active) {
  *flags = 0;
  *is_active = state().has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}
