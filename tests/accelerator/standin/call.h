// What every call does first.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "state.h"

namespace standin {

// A call that needs no context.  A body that returns nothing succeeds.
template <class Body>
cudaError_t call(const char* name, const Body& body) {
  cudaError_t error = state().begin(name);
  if (error == cudaSuccess) {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
    } else {
      error = body();
    }
  }
  if (error != cudaSuccess) last_error = error;
  return error;
}

// A call that uses the context of the current device.
template <class Body>
cudaError_t call_there(const char* name, const Body& body) {
  return call(name, [&] {
    state().use_context(current_device);
    return body();
  });
}

}  // namespace standin
