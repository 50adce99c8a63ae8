// The Python module ptsave._C: converts arguments, releases the GIL, maps errors.  No logic.
#include <ATen/core/Tensor.h>
#include <ATen/core/TensorBase.h>
#include <cxxabi.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "core/archive.h"
#include "core/crc32.h"
#include "core/error.h"
#include "core/file.h"
#include "core/reader.h"
#include "core/writer.h"
#include "pickle/scan.h"
#include "storage/storage.h"

namespace py = pybind11;

namespace ptsave {
namespace {

// ------------------------------------------------------------------------------------------ errors

// Names and texts may hold bytes of a hostile file.
py::str decode(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "surrogateescape"));
}

std::string encode(const py::str& text) {
  const auto bytes = py::reinterpret_steal<py::bytes>(
      PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

void set_os_error(const IoError& error) {
  const auto os_error = py::reinterpret_borrow<py::object>(PyExc_OSError);
  const py::object value =
      os_error(error.errnum(), std::string(std::strerror(error.errnum())), decode(error.path()));
  value.attr("operation") = error.operation();
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
}

// FormatError's arguments: reason, detail, record (None if none), offset (None if none).
void set_format_error(const py::object& type, const FormatError& error) {
  const py::object record =
      error.record().empty() ? py::none() : py::object(decode(error.record()));
  const py::object offset =
      error.offset() == FormatError::kNoOffset ? py::none() : py::object(py::int_(error.offset()));
  PyErr_SetObject(
      type.ptr(),
      py::make_tuple(decode(error.reason()), decode(error.detail()), record, offset).ptr());
}

void register_errors(py::module_& module) {
  static PyObject* format_error = PyErr_NewExceptionWithDoc(
      "ptsave._C.FormatError", "(reason, detail, record, offset) of what is wrong with an archive.",
      PyExc_RuntimeError, nullptr);
  module.attr("FormatError") = py::reinterpret_borrow<py::object>(format_error);
  py::register_exception<LayoutMismatch>(module, "LayoutMismatchError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const IoError& error) {
      if (error.errnum() != 0) return set_os_error(error);
      set_format_error(py::reinterpret_borrow<py::object>(format_error),
                       FormatError("unexpected end of file", error.what()));
    } catch (const FormatError& error) {
      set_format_error(py::reinterpret_borrow<py::object>(format_error), error);
    }
  });
}

// -------------------------------------------------------------------------------------------- GIL

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Takes the GIL back.  Once the interpreter is exiting, a thread that asks for it is ended by
// unwinding its stack; a daemon thread waits here for the end of the process instead.
void take_gil(PyThreadState* state) {
  while (is_finalizing()) std::this_thread::sleep_for(std::chrono::hours(1));
  PyEval_RestoreThread(state);
}

// Not a guard object: taking the GIL can unwind (see above), which a destructor must not.
template <typename Call>
auto without_gil(const Call& call) -> decltype(call()) {
  PyThreadState* const state = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
      take_gil(state);
    } else {
      auto result = call();
      take_gil(state);
      return result;
    }
  } catch (...) {
    if (PyGILState_Check() == 0) take_gil(state);
    throw;
  }
}

// Calls `call` with the GIL, on a thread that without_gil() has taken it from.  If the interpreter
// exits meanwhile, this thread is ended by unwinding; nothing that needs the GIL may be destroyed
// then, so `call` uses the C API without guards, and the unwinding stops here.
template <typename Call>
void with_gil(const Call& call) {
  take_gil(PyGILState_GetThisThreadState());
  try {
    call();
  } catch (const abi::__forced_unwind&) {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  } catch (...) {
    PyEval_SaveThread();
    throw;
  }
  PyEval_SaveThread();
}

// Takes over a reference that a C API call returned; a null one is an exception.
void drop_result(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  Py_DECREF(result);
}

// Called on the waiting thread, without the GIL: lets signal handlers run and reports progress.
Poll make_poll(const std::function<std::uint64_t()>& progress, const py::object& callback) {
  return [progress, callback] {
    with_gil([&] {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      const auto done = static_cast<unsigned long long>(progress());
      if (!callback.is_none()) drop_result(PyObject_CallFunction(callback.ptr(), "K", done));
    });
  };
}

// -------------------------------------------------------------------------------- writing

// Records to write, in order, and their layout.  Keeps `bytes` payloads alive; what an address
// points to is the caller's to keep.
class WritePlan {
 public:
  // A payload is bytes, the address of memory, None for a hole, or a function that makes the
  // payload when its turn comes and returns its address; it stays valid until the next one is
  // called.  With functions, options.n_threads must be 0.
  using Payload = std::variant<py::bytes, std::uintptr_t, py::none, py::function>;
  using Record = std::tuple<std::string, Payload, std::uint64_t>;

  WritePlan(const WritePlan&) = delete;
  WritePlan& operator=(const WritePlan&) = delete;
  ~WritePlan() = default;

  WritePlan(std::string root, const std::vector<Record>& records, std::uint64_t alignment) {
    std::vector<RecordSpec> specs;
    specs.reserve(records.size());
    for (const auto& [name, payload, nbytes] : records) {
      specs.push_back({name, nbytes});
      sources_.push_back(payload);
      addresses_.push_back(address(payload));
      has_holes_ |= std::holds_alternative<py::none>(payload) && nbytes > 0;
      has_makers_ |= std::holds_alternative<py::function>(payload);
    }
    layout_ = plan(std::move(root), specs, alignment);
    payloads_ = [this](std::size_t i) { return payload(i); };
  }

  std::uint64_t nbytes() const { return layout_.nbytes(); }

  void write_file(const std::string& path, const std::string& display, bool durable, bool direct,
                  const WriteOptions& options, const py::object& callback) {
    run(callback, [&](const Poll& poll) {
      AtomicFile target(path, display);
      File& file = target.file();
      if (direct && file.direct_io_alignment().supported()) {
        file.preallocate(nbytes());
        write_direct(layout_, payloads_, file, options, progress_, poll);
      } else {
        write_through_cache(file, options, poll);
      }
      target.commit(durable);
    });
  }

  void write_in_place(const std::string& path, bool durable, const WriteOptions& options,
                      const py::object& callback) {
    run(callback, [&](const Poll& poll) {
      File file = File::open_for_writing(path);
      file.truncate(0);
      write_through_cache(file, options, poll);
      durable ? file.sync() : file.flush();
    });
  }

  void write_descriptor(int fd, std::uint64_t offset, const std::string& name, bool durable,
                        const WriteOptions& options, const py::object& callback) {
    run(callback, [&](const Poll& poll) {
      File file = File::duplicate(fd, name);
      write_buffered(layout_, payloads_, file, offset, options, progress_, poll);
      if (durable) file.sync();
    });
  }

  void write_memory(const py::buffer& target, const WriteOptions& options,
                    const py::object& callback) {
    const py::buffer_info info = target.request(/*writable=*/true);
    if (static_cast<std::uint64_t>(info.size * info.itemsize) != nbytes()) {
      throw py::value_error("the buffer's size is not the archive's");
    }
    run(callback, [&](const Poll& poll) {
      write_to_memory(layout_, payloads_, static_cast<std::byte*>(info.ptr), options, progress_,
                      poll);
    });
  }

  // Calls sink(memoryview) for data and skip(nbytes) for holes.
  void write_stream(const py::function& sink, const py::function& skip, const WriteOptions& options,
                    const py::object& callback) {
    run(callback, [&](const Poll& poll) {
      const auto put = [&](const std::byte* data, std::uint64_t nbytes) {
        poll();
        with_gil([&] {
          if (data == nullptr) {
            const auto hole = static_cast<unsigned long long>(nbytes);
            return drop_result(PyObject_CallFunction(skip.ptr(), "K", hole));
          }
          auto* const bytes = const_cast<char*>(reinterpret_cast<const char*>(data));
          PyObject* const view =
              PyMemoryView_FromMemory(bytes, static_cast<Py_ssize_t>(nbytes), PyBUF_READ);
          if (view == nullptr) throw py::error_already_set();
          PyObject* const result = PyObject_CallOneArg(sink.ptr(), view);
          Py_DECREF(view);
          drop_result(result);
        });
      };
      write_to_stream(layout_, payloads_, put, options, progress_);
    });
  }

 private:
  static const std::byte* address(const Payload& payload) {
    if (const auto* bytes = std::get_if<py::bytes>(&payload)) {
      return reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(bytes->ptr()));
    }
    const auto* pointer = std::get_if<std::uintptr_t>(&payload);
    return pointer == nullptr ? nullptr : reinterpret_cast<const std::byte*>(*pointer);
  }

  const std::byte* payload(std::size_t i) {
    if (has_makers_ && i != made_) {
      if (const auto* make = std::get_if<py::function>(&sources_[i])) {
        with_gil([&] {
          PyObject* const made = PyObject_CallNoArgs(make->ptr());
          if (made == nullptr) throw py::error_already_set();
          addresses_[i] = static_cast<const std::byte*>(PyLong_AsVoidPtr(made));
          Py_DECREF(made);
          if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        });
        made_ = i;
      }
    }
    return addresses_[i];
  }

  void write_through_cache(File& file, const WriteOptions& options, const Poll& poll) {
    if (!has_holes_) file.preallocate(nbytes());
    write_buffered(layout_, payloads_, file, 0, options, progress_, poll);
  }

  template <typename Write>
  void run(const py::object& callback, const Write& write) {
    progress_ = 0;
    made_ = ~std::size_t{0};
    const Poll poll = make_poll([this] { return progress_.load(); }, callback);
    without_gil([&] { write(poll); });
  }

  ArchiveLayout layout_;
  std::vector<Payload> sources_;
  std::vector<const std::byte*> addresses_;
  bool has_holes_ = false;
  bool has_makers_ = false;
  std::size_t made_ = ~std::size_t{0};
  Payloads payloads_;
  Progress progress_{0};
};

void bind_writing(py::module_& module) {
  py::class_<WriteOptions>(module, "WriteOptions")
      .def(py::init([](bool compute_crcs, std::size_t n_threads, std::size_t chunk_nbytes) {
             return WriteOptions{compute_crcs, n_threads, chunk_nbytes};
           }),
           py::kw_only(), py::arg("compute_crcs"), py::arg("n_threads"), py::arg("chunk_nbytes"));
  py::class_<WritePlan>(module, "WritePlan")
      .def(py::init<std::string, const std::vector<WritePlan::Record>&, std::uint64_t>(),
           py::arg("root"), py::arg("records"), py::arg("alignment"))
      .def_property_readonly("nbytes", &WritePlan::nbytes)
      .def("write_file", &WritePlan::write_file, py::arg("path"), py::arg("display"), py::kw_only(),
           py::arg("durable"), py::arg("direct"), py::arg("options"), py::arg("progress"))
      .def("write_in_place", &WritePlan::write_in_place, py::arg("path"), py::kw_only(),
           py::arg("durable"), py::arg("options"), py::arg("progress"))
      .def("write_descriptor", &WritePlan::write_descriptor, py::arg("fd"), py::arg("offset"),
           py::arg("name"), py::kw_only(), py::arg("durable"), py::arg("options"),
           py::arg("progress"))
      .def("write_memory", &WritePlan::write_memory, py::arg("target"), py::kw_only(),
           py::arg("options"), py::arg("progress"))
      .def("write_stream", &WritePlan::write_stream, py::arg("sink"), py::arg("skip"),
           py::kw_only(), py::arg("options"), py::arg("progress"));
}

// -------------------------------------------------------------------------------- reading

// A uint8 tensor over a whole storage: the form in which torch's own reader hands storages out.
py::object wrap_storage(c10::Storage storage) {
  const auto nbytes = static_cast<std::int64_t>(storage.nbytes());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::Make<std::uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

class Reader {
 public:
  Reader(ArchiveSource source, py::object keep)
      : keep_(std::move(keep)),
        reader_(without_gil([&] { return std::make_unique<ArchiveReader>(std::move(source)); })) {}

  static std::unique_ptr<Reader> open_path(const std::string& path) {
    return std::make_unique<Reader>(ArchiveSource(File::open_for_reading(path), 0), py::none());
  }
  static std::unique_ptr<Reader> open_descriptor(int fd, std::uint64_t offset,
                                                 const std::string& name) {
    return std::make_unique<Reader>(ArchiveSource(File::reopen_for_reading(fd, name), offset),
                                    py::none());
  }
  static std::unique_ptr<Reader> open_memory(const py::buffer& buffer, const std::string& name) {
    const py::buffer_info info = buffer.request();
    const auto nbytes = static_cast<std::uint64_t>(info.size * info.itemsize);
    // A memoryview holds the export, so that the buffer's owner cannot resize it meanwhile.
    return std::make_unique<Reader>(
        ArchiveSource(static_cast<const std::byte*>(info.ptr), nbytes, name),
        py::memoryview(buffer));
  }

  py::str root() const { return decode(reader_->index().root()); }
  bool has_crcs() const { return reader_->index().has_crcs(); }
  std::uint64_t nbytes() const { return reader_->source().nbytes(); }

  std::vector<IndexedRecord> records() const {
    const auto records = reader_->index().records();
    return {records.begin(), records.end()};
  }
  std::optional<std::size_t> find(const py::str& name) const {
    const std::size_t i = reader_->index().find(encode(name));
    return i == ArchiveIndex::kNotFound ? std::nullopt : std::optional(i);
  }
  std::uint64_t payload_offset(std::size_t i) const {
    check(i);
    return without_gil([&] { return reader_->payload_offset(i); });
  }
  py::bytes read(std::size_t i, bool verify) const {
    check(i);
    return py::bytes(without_gil([&] { return reader_->read(i, verify); }));
  }

  void start(const std::vector<std::size_t>& records, std::size_t n_threads, bool verify,
             bool exact_offsets) {
    for (const std::size_t i : records) check(i);
    without_gil([&] { reader_->start(records, n_threads, verify, exact_offsets); });
  }
  void wait(std::size_t i, const py::object& callback) {
    check(i);
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    without_gil([&] { reader_->wait(i, poll); });
  }
  std::vector<DamagedRecord> wait_all(const py::object& callback) {
    const Poll poll = make_poll([this] { return reader_->nbytes_read(); }, callback);
    return without_gil([&] { return reader_->wait_all(poll); });
  }
  py::object storage(std::size_t i) {
    check(i);
    LoadedPayload payload = reader_->payload(i);
    if (must_copy(payload)) wait(i, py::none());
    storages_.push_back(make_storage(std::move(payload)));
    return wrap_storage(storages_.back());
  }
  // The load is over: storages given out become resizable, as any other.
  void release_storages() {
    for (const c10::Storage& storage : storages_)
      storage.unsafeGetStorageImpl()->set_resizable(true);
    storages_.clear();
  }
  py::bytes read_at(std::uint64_t offset, std::uint64_t nbytes) const {
    if (nbytes > this->nbytes()) throw py::value_error("more than the archive holds");
    std::string bytes(nbytes, '\0');
    without_gil([&] { reader_->source().read_at(offset, bytes.data(), bytes.size()); });
    return {bytes};
  }
  void cancel() {
    without_gil([&] { reader_->cancel(); });
  }
  std::uint64_t nbytes_to_read() const { return reader_->nbytes_to_read(); }

 private:
  void check(std::size_t i) const {
    if (i >= reader_->index().records().size()) throw py::index_error("no such record");
  }

  py::object keep_;  // outlives reader_
  std::unique_ptr<ArchiveReader> reader_;
  std::vector<c10::Storage> storages_;
};

void bind_reading(py::module_& module) {
  py::class_<IndexedRecord>(module, "Record")
      .def_property_readonly("name", [](const IndexedRecord& self) { return decode(self.name); })
      .def_readonly("nbytes", &IndexedRecord::nbytes)
      .def_readonly("crc", &IndexedRecord::crc)
      .def_readonly("header_offset", &IndexedRecord::header_offset)
      .def_readonly("stored_nbytes", &IndexedRecord::stored_nbytes)
      .def_readonly("method", &IndexedRecord::method)
      .def_property_readonly("stored", &IndexedRecord::stored)
      .def_property_readonly("encrypted", &IndexedRecord::encrypted);
  py::class_<DamagedRecord>(module, "DamagedRecord")
      .def_property_readonly("name", [](const DamagedRecord& self) { return decode(self.name); })
      .def_readonly("payload_offset", &DamagedRecord::payload_offset)
      .def_readonly("expected_crc", &DamagedRecord::expected_crc)
      .def_readonly("actual_crc", &DamagedRecord::actual_crc);
  py::class_<Reader>(module, "Reader")
      .def_static("open_path", &Reader::open_path, py::arg("path"))
      .def_static("open_descriptor", &Reader::open_descriptor, py::arg("fd"), py::arg("offset"),
                  py::arg("name"))
      .def_static("open_memory", &Reader::open_memory, py::arg("buffer"), py::arg("name"))
      .def_property_readonly("root", &Reader::root)
      .def_property_readonly("has_crcs", &Reader::has_crcs)
      .def_property_readonly("nbytes", &Reader::nbytes)
      .def_property_readonly("nbytes_to_read", &Reader::nbytes_to_read)
      .def("records", &Reader::records)
      .def("find", &Reader::find, py::arg("name"))
      .def("payload_offset", &Reader::payload_offset, py::arg("record"))
      .def("read", &Reader::read, py::arg("record"), py::kw_only(), py::arg("verify"))
      .def("start", &Reader::start, py::arg("records"), py::kw_only(), py::arg("n_threads"),
           py::arg("verify"), py::arg("exact_offsets"))
      .def("wait", &Reader::wait, py::arg("record"), py::kw_only(), py::arg("progress"))
      .def("wait_all", &Reader::wait_all, py::kw_only(), py::arg("progress"))
      .def("storage", &Reader::storage, py::arg("record"))
      .def("release_storages", &Reader::release_storages)
      .def("read_at", &Reader::read_at, py::arg("offset"), py::arg("nbytes"))
      .def("cancel", &Reader::cancel);
}

std::uint32_t crc32_of_buffer(const py::buffer& data, std::uint32_t crc) {
  const py::buffer_info info = data.request();
  return without_gil(
      [&] { return crc32(crc, info.ptr, static_cast<std::size_t>(info.size * info.itemsize)); });
}

}  // namespace
}  // namespace ptsave

PYBIND11_MODULE(_C, module) {
  using namespace ptsave;
  register_errors(module);
  bind_writing(module);
  bind_reading(module);
  module.def("crc32", &crc32_of_buffer, py::arg("data"), py::arg("crc") = 0);
  module.def("payload_offset_after", &payload_offset_after, py::arg("header_offset"),
             py::arg("full_name"), py::arg("nbytes"), py::arg("alignment"));
  module.def(
      "rebuilds_blindly",
      [](const py::bytes& pickle, const std::unordered_set<std::string>& dtypes) {
        return rebuilds_blindly(static_cast<std::string_view>(pickle), dtypes);
      },
      py::arg("pickle"), py::arg("dtypes"));
}
