// ptsave._C.tensor_difference.
#include "core/statistics/difference.h"

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/statistics.h"
#include "tensors/tensor_statistics.h"

namespace py = pybind11;

namespace ptsave {
namespace {

// An exact int for whole numbers, else a float.
py::object max_abs_of(const Difference& found, bool is_integer) {
  if (!is_integer) return py::float_(found.max_abs);
  py::int_ low(found.max_abs_integer.low);
  if (!found.max_abs_integer.overflows) return low;
  return (py::int_(1) << py::int_(64)) + low;
}

py::dict to_python(const Difference& found, bool is_integer) {
  py::dict result;
  result["numel"] = found.n;
  result["n_different"] = found.n_different;
  result["first_different"] = found.first_different;
  result["n_outside"] = found.n_outside;
  result["n_nan_a"] = found.n_nan_a;
  result["n_nan_b"] = found.n_nan_b;
  result["n_inf_a"] = found.n_inf_a;
  result["n_inf_b"] = found.n_inf_b;
  result["n_nan_only_a"] = found.n_nan_only_a;
  result["n_nan_only_b"] = found.n_nan_only_b;
  result["n_inf_mismatch"] = found.n_inf_mismatch;
  result["max_abs"] = max_abs_of(found, is_integer);
  result["max_rel"] = found.max_rel;
  result["product"] = found.products.product;
  result["squares_a"] = found.products.squares_a;
  result["squares_b"] = found.products.squares_b;
  result["scale_a"] = found.products.scale_a;
  result["scale_b"] = found.products.scale_b;
  py::tuple ulps(found.ulps.size());
  for (std::size_t i = 0; i < found.ulps.size(); ++i) ulps[i] = found.ulps[i];
  result["ulps"] = std::move(ulps);
  return result;
}

py::object tensor_difference(const py::handle& object_a, const py::handle& object_b, double rtol,
                             double atol, std::size_t n_threads) {
  const at::Tensor a = unpack_measurable(object_a);
  const at::Tensor b = unpack_measurable(object_b);
  if (a.sizes() != b.sizes()) throw py::value_error("the tensors have two shapes");
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
    const Poll poll = make_poll([] { return 0; }, py::none());
    found = without_gil([&] { return find(n_threads, poll); });
  }
  return to_python(found, c10::isIntegralType(a.scalar_type(), /*includeBool=*/true) &&
                              c10::isIntegralType(b.scalar_type(), /*includeBool=*/true));
}

}  // namespace

void bind_difference(py::module_& module) {
  module.def("tensor_difference", &tensor_difference, py::arg("a"), py::arg("b"),
             py::arg("rtol") = 0.0, py::arg("atol") = 0.0, py::arg("n_threads") = 1);
}

}  // namespace ptsave
