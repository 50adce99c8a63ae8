// ptsave._C.Snapshot.
#include <memory>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "core/memory/staging_pool.h"
#include "device/pinned_pool.h"
#include "storage/snapshot.h"
#include "storage/storage.h"

namespace py = pybind11;

namespace ptsave {
namespace {

void copy(Snapshot& snapshot, std::size_t n_threads, const py::object& callback) {
  const Poll poll = make_poll([&] { return snapshot.nbytes_copied(); }, callback);
  without_gil([&] { snapshot.copy(n_threads, poll); });
  snapshot.release_sources();
}

py::dict staging_statistics() {
  const StagingPool::Statistics statistics = StagingPool::instance().statistics();
  py::dict result;
  result["mapped_nbytes"] = statistics.mapped_nbytes;
  result["used_nbytes"] = statistics.used_nbytes;
  result["n_mappings"] = statistics.n_mappings;
  return result;
}

}  // namespace

void bind_staging(py::module_& module) {
  py::class_<Snapshot>(module, "Snapshot")
      .def(py::init([](const StorageList& sources, bool without_bytes) {
             // The pool may have to unmap memory, which takes its time.
             return without_gil([&] { return std::make_unique<Snapshot>(sources, without_bytes); });
           }),
           py::arg("sources"), py::kw_only(), py::arg("without_bytes") = false)
      .def_property_readonly("storages", &Snapshot::storages)
      .def("copy", &copy, py::kw_only(), py::arg("n_threads"), py::arg("progress"))
      .def("release", &Snapshot::release)
      .def("abandon", &Snapshot::abandon);
  module.def("staging_statistics", &staging_statistics);
  module.def("trim_staging_pool", [] { without_gil([] { StagingPool::instance().trim(); }); });
  module.def("release_pinned_memory", [] { without_gil([] { release_pinned_memory(); }); });
}

}  // namespace ptsave
