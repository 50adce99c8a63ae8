// A machine for the steps of torch.save's pickles.  It declines all other steps.  Storages, dtypes,
// globals and the tuples around them may only be arguments of torch's rebuild functions, so none of
// them can be in the result.
#include "pickle/outline/outline.h"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pickle/common/dtypes.h"
#include "pickle/common/opcodes.h"
#include "pickle/common/stack_machine.h"
#include "pickle/in/values.h"

namespace ptsave {
namespace {

constexpr std::size_t kBytesInARow = std::size_t{128} << 10;  // between checks for signals

enum class Kind : std::uint8_t {
  kNothing,      // a memo entry that was never written
  kObject,       // a Python object that may be in the result
  kTensor,       // the same, with facts in place of a tensor
  kOrderedDict,  // the type
  kRebuild,      // _rebuild_tensor_v2
  kRebuildV3,    // _rebuild_tensor_v3
  kParameter,    // _rebuild_parameter
  kDtype,        // index: into kPlainDtypes
  kStorageType,  // the same; kPlainDtypes.size() for an untyped one
  kStorage,      // index: into storages_
  kNewDict,      // an empty OrderedDict that the next steps put into a tuple
  kArguments,    // a tuple with any of these; index: into arguments_
};

struct Part {
  Kind kind = Kind::kNothing;
  std::uint32_t index = 0;
  Object object;

  bool is_object() const { return kind == Kind::kObject || kind == Kind::kTensor; }
};

Part value_of(Object object, Kind kind = Kind::kObject) {
  return {.kind = kind, .index = 0, .object = std::move(object)};
}

struct Storage {
  std::uint32_t dtype;  // as for kStorageType
  std::int64_t nbytes;
  Object place;
};

// Whether an object may be a dict key, because hashing it runs no foreign code.
bool is_plain_key(PyObject* key) {
  return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || PyFloat_CheckExact(key) ||
         PyBool_Check(key) || key == Py_None;
}

std::string_view text_of(const Part& value) {
  if (value.kind != Kind::kObject) throw Declined{};
  const std::optional<std::string_view> text = ptsave::text_of(value.object.get());
  if (!text) throw Declined{};
  return *text;
}

std::int64_t count_of(PyObject* object) {
  const std::optional<std::int64_t> n = natural_number(object);
  if (!n) throw Declined{};
  return *n;
}

std::int64_t count_of(const Part& value) {
  if (value.kind != Kind::kObject) throw Declined{};
  return count_of(value.object.get());
}

std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) throw Declined{};
  return result;
}

std::int64_t sum(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) throw Declined{};
  return result;
}

class Machine final : public StackMachine<Machine, Part> {
 public:
  Machine(std::string_view pickle, StorageRecords& records, PyTypeObject* tensor_type)
      : StackMachine(pickle), reads_(pickle), records_(records), tensor_type_(tensor_type) {
    for (const PlainDtype& dtype : kPlainDtypes) dtype_names_.push_back(new_text(dtype.name));
  }

  Object run() {
    for (std::size_t pause = kBytesInARow;;) {
      if (cursor_.position() >= pause) {
        checked(PyErr_CheckSignals());
        pause = cursor_.position() + kBytesInARow;
      }
      const unsigned char code = byte();
      if (code == opcode::kStop) return std::move(pop_object().object);
      step(code);
    }
  }

 private:
  friend StackMachine;

  void push_object(Object object) { push(value_of(std::move(object))); }
  Part pop_object() {
    Part value = pop();
    if (!value.is_object()) throw Declined{};
    return value;
  }

  static void protocol(unsigned char n) {
    if (n != 2) throw Declined{};
  }

  void constant(unsigned char code, std::string_view operand) {
    switch (code) {
      case opcode::kNone:
        return push_object(Object::borrow(Py_None));
      case opcode::kNewTrue:
        return push_object(Object::borrow(Py_True));
      case opcode::kNewFalse:
        return push_object(Object::borrow(Py_False));
      case opcode::kBinInt:
        return push_object(
            Object::checked(PyLong_FromLong(static_cast<std::int32_t>(little_endian(operand)))));
      case opcode::kBinInt1:
      case opcode::kBinInt2:
        return push_object(
            Object::checked(PyLong_FromLong(static_cast<long>(little_endian(operand)))));
      case opcode::kLong1:
        if (operand.empty() || operand.size() > sizeof(std::int64_t)) throw Declined{};
        return push_object(Object::checked(PyLong_FromLongLong(signed_integer(operand))));
      case opcode::kBinFloat:
        return push_object(Object::checked(PyFloat_FromDouble(big_endian_real(operand))));
      case opcode::kBinUnicode:
        return push_object(decoded_text(operand));
      default:
        throw Declined{};
    }
  }

  bool keep(std::uint32_t i) {
    if (!reads_.is_read(i)) return false;
    if (i >= cursor_.size()) throw Declined{};  // bounds the memory by the pickle's size
    const Part& value = top();
    if (value.kind == Kind::kArguments) arguments_[value.index].is_kept = true;
    return true;
  }

  void make_tuple(std::size_t n) {
    const std::span<Part> parts = last(n);
    const auto is_object = [](const Part& part) {
      return part.is_object() || part.kind == Kind::kNewDict;
    };
    if (!std::ranges::all_of(parts, is_object)) {
      const std::uint32_t index = new_arguments();
      arguments_[index].parts.assign(std::make_move_iterator(parts.begin()),
                                     std::make_move_iterator(parts.end()));
      drop(n);
      return push(Part{.kind = Kind::kArguments, .index = index, .object = {}});
    }
    for (Part& part : parts) {
      if (part.kind == Kind::kNewDict) part = value_of(Object::checked(PyODict_New()));
    }
    Object tuple = Object::checked(PyTuple_New(static_cast<Py_ssize_t>(n)));
    for (std::size_t i = 0; i < n; ++i)
      PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), parts[i].object.release());
    drop(n);
    push_object(std::move(tuple));
  }

  void new_list() { push_object(Object::checked(PyList_New(0))); }
  void new_dict() { push_object(Object::checked(PyDict_New())); }
  static void append(const Part& list, std::span<const Part> items) {
    if (list.kind != Kind::kObject || !PyList_CheckExact(list.object.get())) throw Declined{};
    for (const Part& item : items) {
      if (!item.is_object()) throw Declined{};
      checked(PyList_Append(list.object.get(), item.object.get()));
    }
  }
  static void set_items(const Part& dict, std::span<const Part> items) {
    PyObject* const target = dict.object.get();
    if (dict.kind != Kind::kObject) throw Declined{};
    const bool is_ordered = PyODict_CheckExact(target);
    if (!is_ordered && !PyDict_CheckExact(target)) throw Declined{};
    for (std::size_t i = 0; i < items.size(); i += 2) {
      PyObject* const key = items[i].object.get();
      if (items[i].kind != Kind::kObject || !is_plain_key(key) || !items[i + 1].is_object()) {
        throw Declined{};
      }
      const auto set = is_ordered ? &PyODict_SetItem : &PyDict_SetItem;
      checked(set(target, key, items[i + 1].object.get()));
    }
  }

  void global(std::string_view module, std::string_view name) {
    const std::string_view lines(module.data(), module.size() + 1 + name.size());
    const auto known = globals_.find(lines);
    if (known != globals_.end()) return push(known->second);
    Part value;
    if (lines == "collections\nOrderedDict") value.kind = Kind::kOrderedDict;
    if (lines == "torch._utils\n_rebuild_tensor_v2") value.kind = Kind::kRebuild;
    if (lines == "torch._utils\n_rebuild_tensor_v3") value.kind = Kind::kRebuildV3;
    if (lines == "torch._utils\n_rebuild_parameter") value.kind = Kind::kParameter;
    if (lines == "torch.storage\nUntypedStorage" || lines == "torch\nUntypedStorage") {
      value = {.kind = Kind::kStorageType, .index = kPlainDtypes.size(), .object = {}};
    }
    if (module == "torch") {
      for (std::uint32_t i = 0; i < kPlainDtypes.size(); ++i) {
        if (name == kPlainDtypes[i].name) value = {.kind = Kind::kDtype, .index = i, .object = {}};
        if (!name.empty() && name == kPlainDtypes[i].storage) {
          value = {.kind = Kind::kStorageType, .index = i, .object = {}};
        }
      }
    }
    if (value.kind == Kind::kNothing) throw Declined{};
    globals_.emplace(lines, value);
    push(std::move(value));
  }

  // ("storage", type, key, location, numel)
  void persistent_id() {
    const Part id = pop();
    if (id.kind != Kind::kArguments || arguments_[id.index].parts.size() != 5) throw Declined{};
    const std::vector<Part>& parts = arguments_[id.index].parts;
    if (text_of(parts[0]) != "storage" || parts[1].kind != Kind::kStorageType) throw Declined{};
    const std::uint32_t dtype = parts[1].index;
    const std::int64_t itemsize = dtype < kPlainDtypes.size() ? kPlainDtypes[dtype].itemsize : 1;
    const std::int64_t nbytes = product(count_of(parts[4]), itemsize);
    const std::string_view key = text_of(parts[2]);
    text_of(parts[3]);
    const auto [entry, is_new] =
        storage_of_key_.try_emplace(std::string(key), static_cast<std::uint32_t>(storages_.size()));
    if (is_new) {
      const std::optional<std::size_t> record =
          records_.find(key, static_cast<std::uint64_t>(nbytes));
      if (!record) throw Declined{};
      // Each reference to an empty storage makes a new one.
      Object place =
          nbytes == 0 ? Object::borrow(Py_None) : records_.place_of(*record, parts[3].object.get());
      storages_.push_back({dtype, nbytes, std::move(place)});
    }
    const Storage& known = storages_[entry->second];
    if (known.dtype != dtype || known.nbytes != nbytes) throw Declined{};
    done_with(id);
    push(Part{.kind = Kind::kStorage, .index = entry->second, .object = {}});
  }

  void reduce() {
    const Part arguments = pop();
    const Part function = pop();
    if (function.kind == Kind::kOrderedDict) {
      if (arguments.kind != Kind::kObject || !PyTuple_CheckExact(arguments.object.get()) ||
          PyTuple_GET_SIZE(arguments.object.get()) != 0) {
        throw Declined{};
      }
      // Probably a tensor's hooks, which the outline does not need.
      if (makes_tuple_next()) return push(Part{.kind = Kind::kNewDict, .index = 0, .object = {}});
      return push_object(Object::checked(PyODict_New()));
    }
    if (function.kind == Kind::kParameter) {
      if (arguments.kind != Kind::kObject || !PyTuple_CheckExact(arguments.object.get())) {
        throw Declined{};
      }
      std::vector<Part> parts;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments.object.get()); ++i) {
        PyObject* const part = PyTuple_GET_ITEM(arguments.object.get(), i);
        const bool is_tensor = Py_TYPE(part) == tensor_type_;
        parts.push_back(value_of(Object::borrow(part), is_tensor ? Kind::kTensor : Kind::kObject));
      }
      return push(parameter(parts));
    }
    const bool has_dtype = function.kind == Kind::kRebuildV3;
    if ((function.kind != Kind::kRebuild && !has_dtype) || arguments.kind != Kind::kArguments) {
      throw Declined{};
    }
    Part tensor = new_tensor(arguments_[arguments.index].parts, has_dtype);
    done_with(arguments);
    push(std::move(tensor));
  }

  // Ignores attributes of an OrderedDict, such as a state dict's `_metadata`: they are not entries.
  void build() {
    const Part state = pop();
    const Part& target = top();
    if (state.kind != Kind::kObject || target.kind != Kind::kObject ||
        !PyDict_CheckExact(state.object.get()) || !PyODict_CheckExact(target.object.get())) {
      throw Declined{};
    }
  }
  static void other_step(unsigned char /*code*/) { throw Declined{}; }

  // `arguments` are (storage, offset, size, stride, requires_grad, hooks), and possibly the dtype.
  Part new_tensor(std::span<const Part> arguments, bool has_dtype) {
    if (arguments.size() != (has_dtype ? 7 : 6) || arguments[0].kind != Kind::kStorage) {
      throw Declined{};
    }
    const Storage& storage = storages_[arguments[0].index];
    std::uint32_t dtype = storage.dtype;
    if (has_dtype) {
      if (arguments[6].kind != Kind::kDtype) throw Declined{};
      dtype = arguments[6].index;
    }
    if (dtype >= kPlainDtypes.size()) dtype = 0;  // an untyped storage counts as uint8
    PyObject* const requires_grad = arguments[4].object.get();
    const bool is_flag =
        requires_grad == Py_False ||
        (requires_grad == Py_True && kPlainDtypes[dtype].can_require_grad && !has_dtype);
    const bool has_hooks =
        arguments[5].kind == Kind::kNewDict ||
        (arguments[5].kind == Kind::kObject && PyODict_CheckExact(arguments[5].object.get()));
    if (!is_flag || !has_hooks) throw Declined{};
    Object facts = facts_of(storage, dtype, arguments.subspan(1, 3));
    Object tensor = Object::checked(PyStructSequence_New(tensor_type_));
    PyStructSequence_SET_ITEM(tensor.get(), 0, facts.release());
    PyStructSequence_SET_ITEM(tensor.get(), 1, Object(storage.place).release());
    return value_of(std::move(tensor), Kind::kTensor);
  }

  // (tensor, requires_grad, hooks)
  Part parameter(std::span<const Part> arguments) const {
    if (arguments.size() != 3 || arguments[0].kind != Kind::kTensor ||
        !PyBool_Check(arguments[1].object.get()) ||
        !PyODict_CheckExact(arguments[2].object.get())) {
      throw Declined{};
    }
    PyObject* const facts = PyStructSequence_GET_ITEM(arguments[0].object.get(), 0);
    PyObject* const name = PyTuple_GET_ITEM(facts, 0);
    const auto known = std::ranges::find(dtype_names_, name, &Object::get);
    const PlainDtype& dtype = kPlainDtypes[static_cast<std::size_t>(known - dtype_names_.begin())];
    if (arguments[1].object.get() == Py_True && !dtype.can_require_grad) throw Declined{};
    // A new object in the tensor's storage.
    Object tensor = Object::checked(PyStructSequence_New(tensor_type_));
    PyObject* const place = PyStructSequence_GET_ITEM(arguments[0].object.get(), 1);
    PyStructSequence_SET_ITEM(tensor.get(), 0, Py_NewRef(facts));
    PyStructSequence_SET_ITEM(tensor.get(), 1, Py_NewRef(place));
    return value_of(std::move(tensor), Kind::kTensor);
  }

  // `geometry` is the offset, size and stride.
  Object facts_of(const Storage& storage, std::uint32_t dtype, std::span<const Part> geometry) {
    const std::int64_t itemsize = kPlainDtypes[dtype].itemsize;
    const std::int64_t offset = count_of(geometry[0]);
    PyObject* const size = geometry[1].object.get();
    PyObject* const stride = geometry[2].object.get();
    if (geometry[1].kind != Kind::kObject || geometry[2].kind != Kind::kObject ||
        !PyTuple_CheckExact(size) || !PyTuple_CheckExact(stride) ||
        PyTuple_GET_SIZE(size) != PyTuple_GET_SIZE(stride)) {
      throw Declined{};
    }
    std::int64_t numel = 1;
    std::int64_t end = offset;  // the last element's position
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(size); ++i) {
      const std::int64_t n = count_of(PyTuple_GET_ITEM(size, i));
      const std::int64_t step = count_of(PyTuple_GET_ITEM(stride, i));
      numel = product(numel, n);
      end = sum(end, product(n - 1, step));
    }
    if (numel != 0 && end >= storage.nbytes / itemsize) throw Declined{};
    const std::int64_t begin = product(offset, itemsize);
    const std::int64_t nbytes = product(numel, itemsize);
    Object facts = Object::checked(PyTuple_New(6));
    PyTuple_SET_ITEM(facts.get(), 0, Py_NewRef(dtype_names_[dtype].get()));
    PyTuple_SET_ITEM(facts.get(), 1, Py_NewRef(size));
    PyTuple_SET_ITEM(facts.get(), 2, Py_NewRef(stride));
    for (Py_ssize_t i = 3; const std::int64_t each : {begin, nbytes, storage.nbytes}) {
      PyTuple_SET_ITEM(facts.get(), i++, Object::checked(PyLong_FromLongLong(each)).release());
    }
    return facts;
  }

  // Whether the next step, after an optional unused PUT, makes a tuple of the values above a mark.
  bool makes_tuple_next() {
    PickleCursor ahead = cursor_;
    return reads_.skip_put(ahead) && !ahead.at_end() && ahead.byte() == opcode::kTuple &&
           depth() > 0;
  }

  // The parts of a tuple that has no Python object.  They are reused unless the memo has the tuple.
  struct Arguments {
    std::vector<Part> parts;
    bool is_kept = false;
  };
  std::uint32_t new_arguments() {
    if (free_arguments_.empty()) {
      arguments_.emplace_back();
      return static_cast<std::uint32_t>(arguments_.size() - 1);
    }
    const std::uint32_t index = free_arguments_.back();
    free_arguments_.pop_back();
    return index;
  }
  // Recycles popped arguments that are not in the memo.
  void done_with(const Part& arguments) {
    if (arguments.kind != Kind::kArguments || arguments_[arguments.index].is_kept) return;
    arguments_[arguments.index].parts.clear();
    free_arguments_.push_back(arguments.index);
  }

  Memo reads_;  // only for is_read()
  StorageRecords& records_;
  PyTypeObject* tensor_type_;
  std::vector<Object> dtype_names_;
  std::unordered_map<std::string_view, Part> globals_;
  std::deque<Arguments> arguments_;
  std::vector<std::uint32_t> free_arguments_;
  std::vector<Storage> storages_;
  std::unordered_map<std::string, std::uint32_t> storage_of_key_;
};

}  // namespace

Object make_outlined_tensor_type() {
  static PyStructSequence_Field fields[] = {
      {"facts", "(dtype, shape, stride, offset in the storage, size, size of the storage)"},
      {"place", "the place of its storage; None for an empty storage"},
      {nullptr, nullptr}};
  static PyStructSequence_Desc description = {"ptsave._core.OutlinedTensor",
                                              "A tensor of a file, without its values.", fields, 2};
  return Object::checked(reinterpret_cast<PyObject*>(PyStructSequence_NewType(&description)));
}

Object outline(std::string_view pickle, StorageRecords& records, PyTypeObject* tensor_type) {
  try {
    return Machine(pickle, records, tensor_type).run();
  } catch (const Declined&) {
    return {};
  } catch (const PythonError&) {
    // For example text that is not UTF-8: torch's unpickler then raises its own error.
    if (PyErr_ExceptionMatches(PyExc_ValueError) == 0) throw;
    PyErr_Clear();
    return {};
  }
}

}  // namespace ptsave
