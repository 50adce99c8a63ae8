// Helpers of the Python module's parts, which convert arguments.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <cstddef>

#include "bindings/errors.h"

namespace ptsave {

// The device of a torch.device; TypeError for other objects.
c10::Device unpack_device(const pybind11::handle& device);

// A contiguous tensor in CPU memory or on an accelerator that can be staged; else TypeError.
const at::Tensor& unpack_bytes_of(const pybind11::handle& tensor);

void bind_writing(pybind11::module_& module);
void bind_reading(pybind11::module_& module);
void bind_listing(pybind11::module_& module);
void bind_pickling(pybind11::module_& module);
void bind_staging(pybind11::module_& module);
void bind_ranges(pybind11::module_& module);
void bind_packing(pybind11::module_& module);
void bind_checked(pybind11::module_& module);
void bind_appending(pybind11::module_& module);
void bind_statistics(pybind11::module_& module);
void bind_difference(pybind11::module_& module);
void bind_names(pybind11::module_& module);
void bind_columns(pybind11::module_& module);

}  // namespace ptsave
