// ptsave._C.tensor_statistics.
#include "bindings/statistics.h"

#include <pybind11/complex.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <complex>
#include <limits>
#include <stdexcept>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "device/side_streams.h"
#include "tensors/tensor_statistics.h"

namespace py = pybind11;

namespace ptsave {
namespace {

py::object mean_of(const Statistics& found, bool is_complex) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const double real = found.n_finite() == 0 ? kNan : found.mean;
  if (!is_complex) return py::float_(real);
  return py::cast(std::complex<double>(real, found.imaginary_mean));
}

// A minimum or maximum: the exact int for whole numbers.
py::object extreme_of(const Statistics& found, c10::ScalarType type, double value,
                      std::int64_t integer) {
  if (found.n_finite() == 0) return py::float_(std::numeric_limits<double>::quiet_NaN());
  if (type == c10::ScalarType::Long) return py::int_(integer);
  if (type == c10::ScalarType::UInt64) {
    return py::int_(static_cast<std::uint64_t>(integer) ^ (std::uint64_t{1} << 63));
  }
  if (c10::isIntegralType(type, /*includeBool=*/true)) {
    return py::int_(static_cast<std::int64_t>(value));
  }
  return py::float_(value);
}

// Whether a tensor's elements are contiguous in CPU memory.
bool has_bytes(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.is_conj() && !tensor.is_neg();
}

py::object tensor_statistics(const py::handle& object, std::size_t n_threads) {
  const at::Tensor tensor = unpack_measurable(object);
  const c10::ScalarType type = tensor.scalar_type();
  if (!element_of(type).has_value()) return py::none();
  const Statistics found = tensor.nbytes() <= kNbytesWithGil
                               ? statistics_of(tensor, 1)
                               : without_gil([&] { return statistics_of(tensor, n_threads); });
  return fields_of(found, type);
}

}  // namespace

at::Tensor unpack_measurable(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("expected a tensor");
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (!has_bytes(tensor)) throw py::type_error("expected a contiguous tensor in CPU memory");
  const std::size_t end = byte_offset(tensor) + tensor.nbytes();
  if (tensor.nbytes() != 0 && tensor.storage().nbytes() < end) {
    throw std::runtime_error("the tensor has no memory: its storage was freed");
  }
  return tensor;
}

py::tuple fields_of(const Statistics& found, c10::ScalarType type) {
  return py::make_tuple(
      found.n, found.n_nan, found.n_inf, found.n_zero, mean_of(found, c10::isComplexType(type)),
      found.standard_deviation(), extreme_of(found, type, found.min, found.min_integer),
      extreme_of(found, type, found.max, found.max_integer), found.norm(), found.crc);
}

bool is_storage(const at::Tensor& tensor, const c10::Storage& storage) {
  return has_bytes(tensor) && tensor.has_storage() && tensor.storage().is_alias_of(storage) &&
         tensor.storage_offset() == 0 && tensor.nbytes() == storage.nbytes();
}

void bind_statistics(py::module_& module) {
  module.def("tensor_statistics", &tensor_statistics, py::arg("tensor"), py::arg("n_threads") = 1);
}

}  // namespace ptsave
