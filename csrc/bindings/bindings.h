// Helpers of the Python module's parts, which convert arguments.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include <cstddef>

#include "bindings/interpreter.h"
#include "core/statistics/statistics.h"

namespace c10 {
struct Storage;
}

namespace ptsave {

// Return the C++ value of a torch object.  Throw TypeError for any other object.
const at::Tensor& unpack_tensor(const py::handle& tensor);
const c10::Storage& unpack_storage(const py::handle& storage);
c10::ScalarType unpack_dtype(const py::handle& dtype);
c10::Device unpack_device(const py::handle& device);
py::object wrap_tensor(at::Tensor tensor);

// Returns a contiguous tensor in CPU memory or on an accelerator that ptsave can stage.  Throws
// TypeError for any other object.
const at::Tensor& unpack_bytes_of(const py::handle& tensor);

// Reads of at most this many bytes keep the GIL: taking it back can take longer than the read.
inline constexpr std::size_t kNbytesWithGil = std::size_t{64} << 10;

// Returns a contiguous tensor in CPU memory.  Throws TypeError for any other object, and
// RuntimeError if the tensor's storage was freed.
at::Tensor unpack_measurable(const py::handle& object);

// The fields of capturing.schema.Statistics, in order.
py::tuple fields_of(const Statistics& found, c10::ScalarType type);

// Whether the elements of a contiguous CPU tensor fill the whole storage.
bool is_storage(const at::Tensor& tensor, const c10::Storage& storage);

void bind_writing(py::module_& module);
void bind_reading(py::module_& module);
void bind_pickling(py::module_& module);
void bind_staging(py::module_& module);
void bind_ranges(py::module_& module);
void bind_appending(py::module_& module);
void bind_statistics(py::module_& module);
void bind_columns(py::module_& module);
void bind_patches(py::module_& module);

}  // namespace ptsave
