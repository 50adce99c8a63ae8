// The calls of libcudart that need a device.  Other calls, such as cudaGetErrorString, are left to
// the library itself.
#pragma GCC visibility push(default)
#include <cuda_runtime_api.h>
#pragma GCC visibility pop

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "call.h"
#include "memory.h"
#include "state.h"
#include "stream.h"

namespace standin {
namespace {

struct Event {
  int device;
  bool waits_asleep;
  std::mutex mutex;
  MarkerPtr recorded;

  MarkerPtr marker() {
    const std::lock_guard lock(mutex);
    return recorded;
  }
};
Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

cudaError_t success_if(bool succeeds, cudaError_t otherwise) {
  return succeeds ? cudaSuccess : otherwise;
}

const char* kind_of_copy(const Place& to, const Place& from) {
  if (to.is(Place::kDevice)) return from.is(Place::kDevice) ? "d2d" : "h2d";
  return from.is(Place::kDevice) ? "d2h" : "h2h";
}

cudaError_t copy(void* to, const void* from, std::size_t nbytes, cudaStream_t handle) {
  if (nbytes == 0) return cudaSuccess;
  const Place target = place_of(to, nbytes);
  const Place source = place_of(from, nbytes);
  if (target.is(Place::kNowhere) || source.is(Place::kNowhere)) return cudaErrorInvalidValue;
  Stream& stream = stream_of(handle);
  const bool is_pageable = target.is(Place::kPageable) || source.is(Place::kPageable);
  if (is_pageable && stream.is_capturing()) return cudaErrorStreamCaptureUnsupported;
  state().count_copy(kind_of_copy(target, source), nbytes);
  std::shared_ptr<std::vector<std::byte>> staged;  // pageable memory may change after the call
  if (source.is(Place::kPageable)) {
    staged = std::make_shared<std::vector<std::byte>>(source.data, source.data + nbytes);
  }
  stream.submit([to = target.data, from = source.data, nbytes, staged] {
    std::memcpy(to, staged ? staged->data() : from, nbytes);
  });
  if (!target.is(Place::kPageable)) return cudaSuccess;
  stream.mark()->wait();
  return state().take_error(stream.device());
}

cudaError_t record(Event& event, Stream& stream) {
  if (event.device != stream.device()) return cudaErrorInvalidResourceHandle;
  const std::lock_guard lock(event.mutex);
  event.recorded = stream.mark();
  return cudaSuccess;
}

}  // namespace
}  // namespace standin

using namespace standin;

// ----------------------------------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int* count) {
  return call(__func__, [&] { *count = kDevices; });
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return call(__func__, [&] {
    if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
    current_device = device;
    state().use_context(device);
    return cudaSuccess;
  });
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, state().sticky_error()); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call(__func__, [&] {
    *properties = {};
    std::snprintf(properties->name, sizeof properties->name, "stand-in %d", device);
    properties->uuid.bytes[0] = static_cast<char>(device + 1);
    properties->pciBusID = device + 1;
    properties->totalGlobalMem = kDeviceNbytes;
    properties->major = 9;
    properties->multiProcessorCount = 16;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxGridSize[0] = 1 << 30;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->unifiedAddressing = properties->canMapHostMemory = 1;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call_there(__func__, [&] {
    *least = 0;
    *greatest = -5;
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int /*device*/, int /*peer*/) {
  return call(__func__, [&] { *can = 0; });
}

cudaError_t cudaDeviceSynchronize() {
  return call_there(__func__, [] {
    if (streams().drain(current_device)) state().count("busy_waits");
    return state().take_error(current_device);
  });
}

// ------------------------------------------------------------------------------------------ memory

cudaError_t cudaMalloc(void** address, std::size_t nbytes) {
  return call_there(__func__, [&] {
    *address = device_memory(current_device).allocate(nbytes);
    return success_if(*address != nullptr, cudaErrorMemoryAllocation);
  });
}

cudaError_t cudaFree(void* address) {
  return call_there(__func__, [&] {
    const Place place = place_of(address, 1);
    if (address == nullptr || !place.is(Place::kDevice)) {
      return success_if(address == nullptr, cudaErrorInvalidValue);
    }
    streams().drain(place.device);
    return success_if(device_memory(place.device).release(address), cudaErrorInvalidValue);
  });
}

cudaError_t cudaHostAlloc(void** address, std::size_t nbytes, unsigned /*flags*/) {
  return call_there(__func__, [&] {
    void* block = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) return cudaErrorMemoryAllocation;
    pinned_memory().add(block, nbytes);
    *address = block;
    return cudaSuccess;
  });
}

cudaError_t cudaFreeHost(void* address) {
  return call_there(__func__, [&] {
    for (int device = 0; device < kDevices; ++device) streams().drain(device);
    const std::size_t nbytes = pinned_memory().remove(address);
    if (nbytes == 0) return cudaErrorInvalidValue;
    ::munmap(address, nbytes);  // later uses fault
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  return call_there(__func__, [&] {
    const Place place = place_of(address, 1);
    *attributes = {};
    attributes->device = place.is(Place::kPinned) ? current_device : place.device;
    if (place.is(Place::kDevice)) attributes->type = cudaMemoryTypeDevice;
    if (place.is(Place::kPinned)) {
      attributes->type = cudaMemoryTypeHost;
      attributes->hostPointer = place.data;
    }
    if (!place.is(Place::kPageable)) attributes->devicePointer = const_cast<void*>(address);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t nbytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  return call_there(__func__, [&] { return copy(to, from, nbytes, stream); });
}

// ----------------------------------------------------------------------------------------- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/,
                                         int /*priority*/) {
  return call_there(
      __func__, [&] { *stream = reinterpret_cast<cudaStream_t>(&streams().add(current_device)); });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call_there(__func__, [&] {
    Stream& stream = stream_of(handle);
    if (stream.is_capturing()) return cudaErrorStreamCaptureUnsupported;
    if (!stream.is_idle()) state().count("busy_waits");
    stream.mark()->wait();
    return state().take_error(stream.device());
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call_there(__func__, [&] {
    Stream& stream = stream_of(handle);
    return stream.is_idle() ? state().take_error(stream.device()) : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  return call_there(__func__, [&] {
    if (MarkerPtr marker = event_of(event).marker()) stream_of(stream).wait_for(std::move(marker));
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call_there(__func__, [&] {
    *status = stream_of(stream).is_capturing() ? cudaStreamCaptureStatusActive
                                               : cudaStreamCaptureStatusNone;
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, std::size_t* n_dependencies) {
  if (id != nullptr) *id = 1;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (n_dependencies != nullptr) *n_dependencies = 0;
  return cudaStreamIsCapturing(stream, status);
}

// Only tests begin captures, and no call is an error because another stream captures.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* /*mode*/) {
  return call(__func__, [] {});
}

// ------------------------------------------------------------------------------------------ events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call_there(__func__, [&] {
    auto* made = new Event{current_device, (flags & cudaEventBlockingSync) != 0, {}, {}};
    *event = reinterpret_cast<cudaEvent_t>(made);
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call(__func__, [&] { delete &event_of(event); });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call_there(__func__, [&] { return record(event_of(event), stream_of(stream)); });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned /*flags*/) {
  return call_there(__func__, [&] { return record(event_of(event), stream_of(stream)); });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call(__func__, [&] {
    const MarkerPtr marker = event_of(handle).marker();
    if (marker && !marker->is_complete()) return cudaErrorNotReady;
    return state().take_error(event_of(handle).device);
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call(__func__, [&] {
    Event& event = event_of(handle);
    if (const MarkerPtr marker = event.marker()) {
      if (!event.waits_asleep && !marker->is_complete()) state().count("busy_waits");
      marker->wait();
    }
    return state().take_error(event.device);
  });
}
