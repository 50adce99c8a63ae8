// ptsave._C.tensor_statistics and tensor_difference.
#include <pybind11/complex.h>

#include <complex>
#include <limits>
#include <stdexcept>

#include "bindings/bindings.h"
#include "core/statistics/difference.h"
#include "device/side_streams.h"
#include "tensors/storage.h"

namespace ptsave {
namespace {

py::object mean_of(const Statistics& found, bool is_complex) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const double real = found.n_finite() == 0 ? kNan : found.mean;
  if (!is_complex) return py::float_(real);
  return py::cast(std::complex<double>(real, found.imaginary_mean));
}

// A minimum or maximum; an exact int for whole numbers.
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

// An exact int for whole numbers, else a float.
py::object max_abs_of(const Difference& found, bool is_integer) {
  if (!is_integer) return py::float_(found.max_abs);
  py::int_ low(found.max_abs_integer.low);
  if (!found.max_abs_integer.overflows) return low;
  return (py::int_(1) << py::int_(64)) + low;
}

py::dict to_python(const Difference& found, bool is_integer) {
  py::tuple ulps(found.ulps.size());
  for (std::size_t i = 0; i < found.ulps.size(); ++i) ulps[i] = found.ulps[i];
  return py::dict("numel"_a = found.n, "n_different"_a = found.n_different,
                  "first_different"_a = found.first_different, "n_outside"_a = found.n_outside,
                  "n_nan_a"_a = found.n_nan_a, "n_nan_b"_a = found.n_nan_b,
                  "n_inf_a"_a = found.n_inf_a, "n_inf_b"_a = found.n_inf_b,
                  "n_nan_only_a"_a = found.n_nan_only_a, "n_nan_only_b"_a = found.n_nan_only_b,
                  "n_inf_mismatch"_a = found.n_inf_mismatch,
                  "max_abs"_a = max_abs_of(found, is_integer), "max_rel"_a = found.max_rel,
                  "product"_a = found.products.product, "squares_a"_a = found.products.squares_a,
                  "squares_b"_a = found.products.squares_b, "scale_a"_a = found.products.scale_a,
                  "scale_b"_a = found.products.scale_b, "ulps"_a = std::move(ulps));
}

py::object tensor_difference(const py::handle& object_a, const py::handle& object_b, double rtol,
                             double atol, std::size_t n_threads) {
  const at::Tensor a = unpack_measurable(object_a);
  const at::Tensor b = unpack_measurable(object_b);
  if (a.sizes() != b.sizes()) throw py::value_error("the tensors have different shapes");
  const auto of_a = element_of(a.scalar_type());
  const auto of_b = element_of(b.scalar_type());
  if (!of_a.has_value() || !of_b.has_value()) return py::none();
  const auto n = static_cast<std::size_t>(a.numel());
  const auto find = [&](std::size_t threads, const Poll& poll) {
    return difference_of(*of_a, a.const_data_ptr(), *of_b, b.const_data_ptr(), n, {rtol, atol},
                         threads, poll);
  };
  Difference found;
  if (a.nbytes() + b.nbytes() <= kNbytesWithGil) {
    found = find(1, {});
  } else {
    const Poll poll = make_poll();
    found = without_gil([&] { return find(n_threads, poll); });
  }
  return to_python(found, c10::isIntegralType(a.scalar_type(), /*includeBool=*/true) &&
                              c10::isIntegralType(b.scalar_type(), /*includeBool=*/true));
}

}  // namespace

at::Tensor unpack_measurable(const py::handle& object) {
  const at::Tensor& tensor = unpack_tensor(object);
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
  module.def("tensor_statistics", &tensor_statistics, "tensor"_a, "n_threads"_a = 1);
  module.def("tensor_difference", &tensor_difference, "a"_a, "b"_a, "rtol"_a = 0.0, "atol"_a = 0.0,
             "n_threads"_a = 1);
}

}  // namespace ptsave
