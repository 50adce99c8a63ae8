// Current devices and contexts, as torch's CUDA functions keep them (c10/cuda/CUDAFunctions.cpp).
//
// A device has a context once a thread has really made it its current one (cudaSetDevice), or has
// used the device that was.  A context takes hundreds of MiB of a GPU, so torch goes back lazily: a
// guard that ends only notes the device that was current, if that has no context yet.  But events,
// which go there and back by set_current_device(), do not: they make one on the device that the
// thread comes from, which is device 0 in every thread that has not chosen.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <set>

namespace fake {

void check_device(c10::DeviceIndex device);

// The calling thread's: GetDevice(), SetDevice(), MaybeSetDevice(), ExchangeDevice() and
// MaybeExchangeDevice() of c10::cuda.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
void maybe_set_current_device(c10::DeviceIndex device);
c10::DeviceIndex exchange_current_device(c10::DeviceIndex device);
c10::DeviceIndex maybe_exchange_current_device(c10::DeviceIndex device);

// Does something that needs a context, such as allocating memory.
void use_current_device();
// The same for what any context will do, such as locking pages of the host.
void use_any_context();

bool has_context(c10::DeviceIndex device);
// By device: the threads, by the system's numbers, that have made it their current one or used it.
std::map<c10::DeviceIndex, std::set<int>> contexts();
void forget_contexts();

// Is neither copied nor moved.
struct Fixed {
  Fixed() = default;
  Fixed(const Fixed&) = delete;
  Fixed& operator=(const Fixed&) = delete;
};

// A use of a device, under torch's CUDAGuard.
class OnDevice : Fixed {
 public:
  explicit OnDevice(c10::DeviceIndex device) : previous_(exchange_current_device(device)) {
    use_current_device();
  }
  ~OnDevice() { maybe_set_current_device(previous_); }

 private:
  c10::DeviceIndex previous_;
};

// The same as CUDAGuardImpl goes there and back for an event: lazily in neither direction.
class AtDevice : Fixed {
 public:
  explicit AtDevice(c10::DeviceIndex device) : previous_(current_device()) {
    set_current_device(device);
    use_current_device();
  }
  ~AtDevice() { set_current_device(previous_); }

 private:
  c10::DeviceIndex previous_;
};

}  // namespace fake
