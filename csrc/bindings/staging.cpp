// ptsave._C.Snapshot.
#include <cstddef>
#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "core/memory/staging_pool.h"
#include "core/pipeline/pipeline.h"
#include "device/accelerator_copies.h"
#include "tensors/snapshot.h"
#include "tensors/storage.h"

namespace ptsave {
namespace {

void copy(Snapshot& snapshot, std::size_t n_threads, const py::object& callback,
          const py::object& when_slow) {
  const Poll poll = make_poll([&] { return snapshot.nbytes_copied(); }, callback);
  const auto call = [&] {
    if (when_slow.is_none()) return false;
    bool has_writer = false;
    with_gil([&] {
      PyObject* const result = PyObject_CallNoArgs(when_slow.ptr());
      has_writer = result == Py_True;
      drop_result(result);
    });
    return has_writer;
  };
  without_gil([&] { snapshot.copy(n_threads, poll, call); });
  snapshot.release_sources();
}

py::dict staging_statistics() {
  const StagingPool::Statistics statistics = StagingPool::instance().statistics();
  return py::dict("mapped_nbytes"_a = statistics.mapped_nbytes,
                  "used_nbytes"_a = statistics.used_nbytes, "n_mappings"_a = statistics.n_mappings);
}

// Populates the pool's free memory on one thread of low priority.
void populate_staging_pool(const py::object& callback) {
  const Poll poll = make_poll({}, callback);
  without_gil([&] {
    const StagingPool& pool = StagingPool::instance();
    const std::vector<StagingPool::FreePiece> pieces = pool.free_pieces();
    run_chunks(
        pieces.size(), 1, [&](std::size_t i) { pool.populate(pieces[i]); }, poll,
        Priority::kBackground);
  });
}

}  // namespace

void bind_staging(py::module_& module) {
  py::class_<Snapshot>(module, "Snapshot")
      .def(py::init([](const StorageList& sources, bool without_bytes) {
             // The pool may have to unmap memory, which takes time.
             return without_gil([&] { return std::make_unique<Snapshot>(sources, without_bytes); });
           }),
           "sources"_a, py::kw_only(), "without_bytes"_a = false)
      .def_property_readonly("storages", &Snapshot::storages)
      .def("copy", &copy, py::kw_only(), "n_threads"_a, "progress"_a, "when_slow"_a = py::none())
      .def("close", [](Snapshot& self) { without_gil([&] { self.payloads().close(); }); })
      .def("release", &Snapshot::release)
      .def("abandon", &Snapshot::abandon);
  module.def("staging_statistics", &staging_statistics);
  module.def("trim_staging_pool", [] { without_gil([] { StagingPool::instance().trim(); }); });
  module.def("populate_staging_pool", &populate_staging_pool, "progress"_a);
  module.def("release_pinned_memory", [] { without_gil([] { release_pinned_memory(); }); });
}

}  // namespace ptsave
