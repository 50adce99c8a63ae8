// ptsave._C.WritePlan.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/plan_options.h"
#include "bindings/sourced_payloads.h"
#include "bindings/stream_sink.h"
#include "core/archive.h"
#include "core/file.h"
#include "core/keep_for_ever.h"
#include "core/staged_chunks.h"
#include "core/writer.h"
#include "device/accelerator_stager.h"
#include "device/side_streams.h"
#include "storage/storage.h"

namespace py = pybind11;

namespace ptsave {
namespace {

// Records to write, in order, and their layout.  Keeps `bytes` and listed storages alive; what an
// address points to is the caller's to keep.
class WritePlan {
 public:
  // A payload is bytes, the address of memory, None for a hole, or a function that makes the
  // payload when its turn comes and returns its address; it stays valid until the next one is
  // called.  With functions, options.n_threads must be 0.
  using Payload = std::variant<py::bytes, std::uintptr_t, py::none, py::function>;
  using Record = std::tuple<std::string, Payload, std::uint64_t>;
  // A list of storages, in CPU memory or on accelerators, stands for the records data/0, data/1,
  // ...
  using Records = std::vector<std::variant<Record, const StorageList*>>;

  WritePlan(const WritePlan&) = delete;
  WritePlan& operator=(const WritePlan&) = delete;
  ~WritePlan() = default;

  WritePlan(const std::string& root, const Records& records, std::uint64_t alignment) {
    std::vector<RecordSpec> specs;
    for (const auto& item : records) {
      if (const auto* record = std::get_if<Record>(&item)) {
        add(*record, specs);
      } else {
        add(*std::get<const StorageList*>(item), specs);
      }
    }
    layout_ = plan(root, specs, alignment);
    payloads_ = [this](std::size_t i) { return payload(i); };
  }

  std::uint64_t nbytes() const { return layout_.nbytes(); }
  // Lets go of what is to be written; nothing can be written after.
  void release() {
    is_released_ = true;
    storages_.clear();
    on_accelerators_.clear();
    staged_ahead_.reset();
    sourced_ = {};
    kept_bytes_.clear();
    makers_.clear();
  }
  // The same in a forked child, where what accelerators know must not be touched, not even to free
  // it: freeing page-locked memory asks the driver, which is the parent's.  It stays for ever.
  void abandon() {
    keep_for_ever(std::exchange(on_accelerators_, {}));
    keep_for_ever(std::move(staged_ahead_));
    release();
  }
  // Payloads that are parts of other files or of memory: their record's name, the source, the
  // offset in it, and the CRC if it is known.  Nothing may be on accelerators.
  using Sourced = std::tuple<std::string, std::size_t, std::uint64_t, std::optional<std::uint32_t>>;
  void read_from(std::shared_ptr<PayloadSources> sources, const std::vector<Sourced>& sourced) {
    if (is_staged()) throw py::value_error("the payloads come from somewhere else");
    std::unordered_map<std::string_view, std::size_t> numbers;
    for (std::size_t i = 0; i < layout_.size(); ++i) numbers.emplace(layout_.name(i), i);
    std::vector<SourcePayload> payloads(layout_.size());
    for (const auto& [name, source, offset, crc] : sourced) {
      const auto found = numbers.find(name);
      if (found == numbers.end()) throw py::key_error(name);
      payloads[found->second] = {source, offset, crc};
    }
    sourced_ = SourcedPayloads(std::move(sources), std::move(payloads));
  }
  // Those whose CRC was not the one expected, with what it was.
  std::vector<std::pair<std::string, std::uint32_t>> damaged() const {
    std::vector<std::pair<std::string, std::uint32_t>> result;
    for (const auto& [record, crc] : sourced_.damaged()) {
      result.emplace_back(layout_.name(record), crc);
    }
    return result;
  }

  // Whether payloads are left out.
  bool has_holes() const { return has_holes_; }
  // Whether payloads are made one at a time.
  bool is_sequential() const { return !makers_.empty(); }
  // Whether payloads come from accelerators, or from files.
  bool is_staged() const {
    return !on_accelerators_.empty() || staged_ahead_ != nullptr || !sourced_.empty();
  }

  // What is on accelerators will be written as the current streams of this thread leave it now,
  // and with this chunk size.
  void begin_staging(const PlanOptions& options) {
    if (on_accelerators_.empty()) return;
    auto stager =
        std::make_unique<AcceleratorStager>(std::exchange(on_accelerators_, {}), std::nullopt);
    staged_ahead_ = std::make_unique<StagedAhead>(layout_, std::move(stager), options.chunk_nbytes);
  }
  // Copies it to the host, all of it: the plan does not need the accelerators' memory after.
  void stage(std::size_t n_threads, const py::object& callback) {
    if (staged_ahead_ == nullptr) return;
    const Poll poll = make_poll([] { return std::uint64_t{0}; }, callback);
    without_gil([&] { staged_ahead_->run(n_threads, poll); });
  }

  void write_file(const std::string& path, const std::string& display, bool durable, bool direct,
                  const PlanOptions& options, const py::object& callback) {
    run(options, callback, [&](const WriteOptions& write, const Poll& poll) {
      AtomicFile target(path, display);
      File& file = target.file();
      if (direct && file.direct_io_alignment().supported()) {
        file.preallocate(nbytes());
        write_direct(layout_, payloads_, file, write, progress_, poll);
      } else {
        write_through_cache(file, write, poll);
      }
      target.commit(durable);
    });
  }

  void write_in_place(const std::string& path, std::optional<int> scratch, bool durable,
                      const PlanOptions& options, const py::object& callback) {
    run(options, callback, [&](const WriteOptions& write, const Poll& poll) {
      const auto write_to = [&](File& file) { write_through_cache(file, write, poll); };
      std::optional<File> first;
      if (scratch) first = File::duplicate(*scratch, path);
      overwrite(path, first ? &*first : nullptr, has_holes_ ? 0 : nbytes(), durable, write_to,
                poll);
    });
  }

  void write_descriptor(int fd, std::uint64_t offset, const std::string& name, bool durable,
                        const PlanOptions& options, const py::object& callback) {
    run(options, callback, [&](const WriteOptions& write, const Poll& poll) {
      File file = File::duplicate(fd, name);
      write_buffered(layout_, payloads_, file, offset, write, progress_, poll);
      if (durable) file.sync();
    });
  }

  void write_memory(const py::buffer& target, const PlanOptions& options,
                    const py::object& callback) {
    const py::buffer_info info = target.request(/*writable=*/true);
    if (static_cast<std::uint64_t>(info.size * info.itemsize) != nbytes()) {
      throw py::value_error("the buffer's size is not the archive's");
    }
    run(options, callback, [&](const WriteOptions& write, const Poll& poll) {
      write_to_memory(layout_, payloads_, static_cast<std::byte*>(info.ptr), write, progress_,
                      poll);
    });
  }

  // Calls sink(memoryview) for data and skip(nbytes) for holes.
  void write_stream(const py::function& sink, const py::function& skip, const PlanOptions& options,
                    const py::object& callback) {
    run(options, callback, [&](const WriteOptions& write, const Poll& poll) {
      const StreamSink put = make_stream_sink(sink, skip, poll);
      write_to_stream(layout_, payloads_, put, write, progress_);
    });
  }

 private:
  void add(const Record& record, std::vector<RecordSpec>& specs) {
    const auto& [name, payload, nbytes] = record;
    if (const auto* bytes = std::get_if<py::bytes>(&payload)) kept_bytes_.push_back(*bytes);
    if (const auto* make = std::get_if<py::function>(&payload))
      makers_.emplace(specs.size(), *make);
    has_holes_ |= std::holds_alternative<py::none>(payload) && nbytes > 0;
    specs.push_back({name, nbytes});
    addresses_.push_back(address(payload));
  }

  void add(const StorageList& list, std::vector<RecordSpec>& specs) {
    specs.reserve(specs.size() + list.storages.size());
    addresses_.reserve(specs.capacity());
    for (std::size_t i = 0; i < list.storages.size(); ++i) {
      const c10::Storage& storage = list.storages[i];
      const bool on_host = storage.device().is_cpu();
      if (on_host) {
        has_holes_ |= storage.data() == nullptr && storage.nbytes() > 0;
        storages_.push_back(storage);
      } else if (storage.nbytes() > 0) {
        on_accelerators_.emplace(specs.size(), storage);
      }
      specs.push_back({"data/" + std::to_string(i), storage.nbytes()});
      addresses_.push_back(on_host ? static_cast<const std::byte*>(storage.data()) : nullptr);
    }
  }

  static const std::byte* address(const Payload& payload) {
    if (const auto* bytes = std::get_if<py::bytes>(&payload)) {
      return reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(bytes->ptr()));
    }
    const auto* pointer = std::get_if<std::uintptr_t>(&payload);
    return pointer == nullptr ? nullptr : reinterpret_cast<const std::byte*>(*pointer);
  }

  const std::byte* payload(std::size_t i) {
    if (makers_.empty() || i == made_) return addresses_[i];
    if (const auto make = makers_.find(i); make != makers_.end()) {
      with_gil([&] {
        PyObject* const made = PyObject_CallNoArgs(make->second.ptr());
        if (made == nullptr) throw py::error_already_set();
        addresses_[i] = static_cast<const std::byte*>(PyLong_AsVoidPtr(made));
        Py_DECREF(made);
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
      });
      made_ = i;
    }
    return addresses_[i];
  }

  void write_through_cache(File& file, const WriteOptions& options, const Poll& poll) {
    if (!has_holes_) file.preallocate(nbytes());
    write_buffered(layout_, payloads_, file, 0, options, progress_, poll);
  }

  template <typename Write>
  void run(const PlanOptions& options, const py::object& callback, const Write& write) {
    if (is_released_) throw py::value_error("the plan was released");
    progress_ = 0;
    made_ = ~std::size_t{0};
    WriteOptions write_options = options;
    const std::unique_ptr<Stager> stager = make_stager(options, write_options);
    const Poll poll = make_poll([this] { return progress_.load(); }, callback);
    without_gil([&] { write(write_options, poll); });
  }

  // Nothing if all payloads are in host memory by now.
  std::unique_ptr<Stager> make_stager(const PlanOptions& options, WriteOptions& write) {
    if (!sourced_.empty()) return sourced_.make_stager(write);
    write.stager = staged_ahead_.get();
    if (on_accelerators_.empty()) return nullptr;
    const std::size_t nbytes = max_staged_nbytes(options.chunk_nbytes);
    const std::size_t max_buffers =
        std::max<std::size_t>(options.max_pinned_nbytes / std::bit_ceil(nbytes), 1);
    auto stager = std::make_unique<AcceleratorStager>(
        on_accelerators_, AcceleratorStager::Buffers{nbytes, max_buffers});
    write.stager = stager.get();
    write.n_threads = std::min(options.n_threads, max_buffers);  // each holds one
    return stager;
  }

  ArchiveLayout layout_;
  std::vector<py::bytes> kept_bytes_;
  std::vector<c10::Storage> storages_;  // in CPU memory
  AcceleratorStager::Sources on_accelerators_;
  std::unique_ptr<StagedAhead> staged_ahead_;
  SourcedPayloads sourced_;
  std::unordered_map<std::size_t, py::function> makers_;
  std::vector<const std::byte*> addresses_;
  bool has_holes_ = false;
  bool is_released_ = false;
  std::size_t made_ = ~std::size_t{0};
  Payloads payloads_;
  Progress progress_{0};
};

}  // namespace

void bind_writing(py::module_& module) {
  module.def(
      "can_stage",
      [](const py::handle& device) { return SideStreams::are_supported(unpack_device(device)); },
      py::arg("device"));
  py::class_<PlanOptions>(module, "WriteOptions")
      .def(py::init([](bool compute_crcs, std::size_t n_threads, std::size_t chunk_nbytes,
                       std::size_t max_pinned_nbytes) {
             return PlanOptions{{.compute_crcs = compute_crcs,
                                 .n_threads = n_threads,
                                 .chunk_nbytes = chunk_nbytes},
                                max_pinned_nbytes};
           }),
           py::kw_only(), py::arg("compute_crcs"), py::arg("n_threads"), py::arg("chunk_nbytes"),
           py::arg("max_pinned_nbytes"));
  py::class_<WritePlan>(module, "WritePlan")
      .def(py::init<const std::string&, const WritePlan::Records&, std::uint64_t>(),
           py::arg("root"), py::arg("records"), py::arg("alignment"))
      .def_property_readonly("nbytes", &WritePlan::nbytes)
      .def("release", &WritePlan::release)
      .def("abandon", &WritePlan::abandon)
      .def_property_readonly("has_holes", &WritePlan::has_holes)
      .def_property_readonly("is_sequential", &WritePlan::is_sequential)
      .def_property_readonly("is_staged", &WritePlan::is_staged)
      .def("read_from", &WritePlan::read_from, py::arg("sources"), py::arg("payloads"))
      .def_property_readonly("damaged", &WritePlan::damaged)
      .def("begin_staging", &WritePlan::begin_staging, py::kw_only(), py::arg("options"))
      .def("stage", &WritePlan::stage, py::kw_only(), py::arg("n_threads"), py::arg("progress"))
      .def("write_file", &WritePlan::write_file, py::arg("path"), py::arg("display"), py::kw_only(),
           py::arg("durable"), py::arg("direct"), py::arg("options"), py::arg("progress"))
      .def("write_in_place", &WritePlan::write_in_place, py::arg("path"), py::kw_only(),
           py::arg("scratch"), py::arg("durable"), py::arg("options"), py::arg("progress"))
      .def("write_descriptor", &WritePlan::write_descriptor, py::arg("fd"), py::arg("offset"),
           py::arg("name"), py::kw_only(), py::arg("durable"), py::arg("options"),
           py::arg("progress"))
      .def("write_memory", &WritePlan::write_memory, py::arg("target"), py::kw_only(),
           py::arg("options"), py::arg("progress"))
      .def("write_stream", &WritePlan::write_stream, py::arg("sink"), py::arg("skip"),
           py::kw_only(), py::arg("options"), py::arg("progress"));
  module.def(
      "resolve_links",
      [](const std::string& path) -> std::optional<py::bytes> {
        const std::optional<std::string> target = without_gil([&] { return resolve_links(path); });
        return target ? std::optional<py::bytes>(*target) : std::nullopt;
      },
      py::arg("path"));
  module.def(
      "remove_leftovers",
      [](const std::string& path) { without_gil([&] { remove_leftovers(path); }); },
      py::arg("path"));
  module.def(
      "target_of_temporary",
      [](const std::string& entry) { return py::bytes(target_of_temporary(entry)); },
      py::arg("entry"));
}

}  // namespace ptsave
