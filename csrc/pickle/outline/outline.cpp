// A machine for the steps of torch.save's pickles.  It declines all other steps.  Storages, dtypes,
// globals and the tuples around them may only be arguments of torch's rebuild functions, so none of
// them can be in the result.
#include "pickle/outline/outline.h"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <iterator>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pickle/common/opcodes.h"
#include "pickle/in/values.h"

namespace ptsave {
namespace {

// Thrown if the pickle is not a plain one.
struct Declined {};

constexpr std::size_t kBytesInARow = std::size_t{128} << 10;  // between checks for signals

struct Dtype {
  std::string_view name;     // torch's
  std::string_view storage;  // the storage type's name; empty for dtypes with untyped storages
  std::int64_t itemsize;
  bool can_require_grad;
};

// The dtypes whose tensors torch.empty() makes without a quantizer and without a warning.
constexpr std::array kDtypes = {
    Dtype{"uint8", "ByteStorage", 1, false},
    Dtype{"int8", "CharStorage", 1, false},
    Dtype{"int16", "ShortStorage", 2, false},
    Dtype{"int32", "IntStorage", 4, false},
    Dtype{"int64", "LongStorage", 8, false},
    Dtype{"bool", "BoolStorage", 1, false},
    Dtype{"float16", "HalfStorage", 2, true},
    Dtype{"bfloat16", "BFloat16Storage", 2, true},
    Dtype{"float32", "FloatStorage", 4, true},
    Dtype{"float64", "DoubleStorage", 8, true},
    Dtype{"complex64", "ComplexFloatStorage", 8, true},
    Dtype{"complex128", "ComplexDoubleStorage", 16, true},
    Dtype{"uint16", "", 2, false},
    Dtype{"uint32", "", 4, false},
    Dtype{"uint64", "", 8, false},
    Dtype{"float8_e5m2", "", 1, true},
    Dtype{"float8_e4m3fn", "", 1, true},
    Dtype{"float8_e5m2fnuz", "", 1, true},
    Dtype{"float8_e4m3fnuz", "", 1, true},
    Dtype{"float8_e8m0fnu", "", 1, true},
};

enum class Kind : std::uint8_t {
  kNothing,      // a memo entry that was never written
  kObject,       // a Python object that may be in the result
  kTensor,       // the same, with facts in place of a tensor
  kOrderedDict,  // the type
  kRebuild,      // _rebuild_tensor_v2
  kRebuildV3,    // _rebuild_tensor_v3
  kParameter,    // _rebuild_parameter
  kDtype,        // index: into kDtypes
  kStorageType,  // the same; kDtypes.size() for an untyped one
  kStorage,      // index: into storages_
  kNewDict,      // an empty OrderedDict that the next steps put into a tuple
  kArguments,    // a tuple with any of these; index: into arguments_
};

// A value of the outline's machine.
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
  if (value.kind != Kind::kObject || !PyUnicode_CheckExact(value.object.get())) throw Declined{};
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(value.object.get(), &size);
  if (text == nullptr) throw PythonError{};
  return {text, static_cast<std::size_t>(size)};
}

std::int64_t count_of(PyObject* object) {
  if (!PyLong_CheckExact(object)) throw Declined{};
  int overflow = 0;
  const long long n = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0 || n < 0) throw Declined{};
  return n;
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

class Machine {
 public:
  Machine(std::string_view pickle, StorageRecords& records, PyTypeObject* tensor_type)
      : cursor_(pickle), reads_(pickle), records_(records), tensor_type_(tensor_type) {
    for (const Dtype& dtype : kDtypes) {
      dtype_names_.push_back(Object::checked(PyUnicode_FromStringAndSize(
          dtype.name.data(), static_cast<Py_ssize_t>(dtype.name.size()))));
    }
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
  void step(unsigned char code);
  void step_of_containers(unsigned char code);

  // ---------------------------------------------------------------------------------- operands

  std::string_view exactly(std::size_t n) {
    const std::string_view bytes = cursor_.take(n);
    if (bytes.size() < n) throw Declined{};
    return bytes;
  }
  unsigned char byte() { return static_cast<unsigned char>(exactly(1).front()); }
  template <class Number>
  Number number() {
    return static_cast<Number>(little_endian(exactly(sizeof(Number))));
  }

  // ------------------------------------------------------------------------------------- stack

  void push(Part value) { stack_.push_back(std::move(value)); }
  void push(Object object) { stack_.push_back(value_of(std::move(object))); }
  std::size_t base() const { return marks_.empty() ? 0 : marks_.back(); }
  Part& top(std::size_t n = 1) {
    if (stack_.size() < base() + n) throw Declined{};
    return stack_[stack_.size() - n];
  }
  Part pop() {
    Part value = std::move(top());
    stack_.pop_back();
    return value;
  }
  Part pop_object() {
    Part value = pop();
    if (!value.is_object()) throw Declined{};
    return value;
  }
  std::size_t pop_mark() {
    if (marks_.empty()) throw Declined{};
    const std::size_t n = stack_.size() - marks_.back();
    marks_.pop_back();
    return n;
  }
  std::span<Part> last(std::size_t n) {
    top(n + 1);  // checks the value below them, too
    return std::span(stack_).last(n);
  }
  void drop(std::size_t n) { stack_.resize(stack_.size() - n); }

  // -------------------------------------------------------------------------------------- memo

  void put(std::uint32_t i) {
    const Part& value = top();
    if (!reads_.is_read(i)) return;
    if (i >= cursor_.size()) throw Declined{};  // bounds the memory by the pickle's size
    if (value.kind == Kind::kArguments) arguments_[value.index].is_kept = true;
    if (i >= memo_.size()) memo_.resize(std::size_t{i} + 1);
    memo_[i] = value;
  }
  void get(std::uint32_t i) {
    if (i >= memo_.size() || memo_[i].kind == Kind::kNothing) throw Declined{};
    push(memo_[i]);
  }

  // ------------------------------------------------------------------------------------ values

  void real();
  void long_integer();
  void text();
  void make_tuple(std::size_t n);
  void append(std::size_t n);
  void set_items(std::size_t n);
  void global();
  void persistent_id();
  void reduce();
  void build();

  Part new_tensor(std::span<const Part> arguments, bool has_dtype);
  Part parameter(std::span<const Part> arguments) const;
  Object facts_of(const Storage& storage, std::uint32_t dtype, std::span<const Part> geometry);

  bool makes_tuple_next();

  // The parts of a tuple that is no object.  They are reused unless the memo has the tuple.
  struct Arguments {
    std::vector<Part> parts;
    bool is_kept = false;
  };
  std::uint32_t new_arguments();
  void done_with(const Part& arguments);

  PickleCursor cursor_;
  Memo reads_;  // only for is_read()
  StorageRecords& records_;
  PyTypeObject* tensor_type_;
  std::vector<Object> dtype_names_;
  std::vector<Part> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Part> memo_;
  std::unordered_map<std::string_view, Part> globals_;
  std::deque<Arguments> arguments_;
  std::vector<std::uint32_t> free_arguments_;
  std::vector<Storage> storages_;
  std::unordered_map<std::string, std::uint32_t> storage_of_key_;
};

void Machine::step(unsigned char code) {
  switch (code) {
    case opcode::kProto:
      if (byte() != 2) throw Declined{};
      return;
    case opcode::kMark:
      return marks_.push_back(stack_.size());
    case opcode::kNone:
      return push(Object::borrow(Py_None));
    case opcode::kNewTrue:
      return push(Object::borrow(Py_True));
    case opcode::kNewFalse:
      return push(Object::borrow(Py_False));
    case opcode::kBinInt:
      return push(Object::checked(PyLong_FromLong(number<std::int32_t>())));
    case opcode::kBinInt1:
      return push(Object::checked(PyLong_FromLong(byte())));
    case opcode::kBinInt2:
      return push(Object::checked(PyLong_FromLong(number<std::uint16_t>())));
    case opcode::kLong1:
      return long_integer();
    case opcode::kBinFloat:
      return real();
    case opcode::kBinUnicode:
      return text();
    case opcode::kBinPut:
      return put(byte());
    case opcode::kLongBinPut:
      return put(number<std::uint32_t>());
    case opcode::kBinGet:
      return get(byte());
    case opcode::kLongBinGet:
      return get(number<std::uint32_t>());
    case opcode::kGlobal:
      return global();
    case opcode::kBinPersId:
      return persistent_id();
    case opcode::kReduce:
      return reduce();
    case opcode::kBuild:
      return build();
    default:
      return step_of_containers(code);
  }
}

void Machine::step_of_containers(unsigned char code) {
  switch (code) {
    case opcode::kEmptyTuple:
      return make_tuple(0);
    case opcode::kTuple1:
      return make_tuple(1);
    case opcode::kTuple2:
      return make_tuple(2);
    case opcode::kTuple3:
      return make_tuple(3);
    case opcode::kTuple:
      return make_tuple(pop_mark());
    case opcode::kEmptyList:
      return push(Object::checked(PyList_New(0)));
    case opcode::kEmptyDict:
      return push(Object::checked(PyDict_New()));
    case opcode::kAppend:
      return append(1);
    case opcode::kAppends:
      return append(pop_mark());
    case opcode::kSetItem:
      return set_items(2);
    case opcode::kSetItems:
      return set_items(pop_mark());
    default:
      throw Declined{};
  }
}

void Machine::real() {
  std::uint64_t bits = 0;
  for (const char each : exactly(sizeof(double)))
    bits = bits << 8 | static_cast<unsigned char>(each);
  push(Object::checked(PyFloat_FromDouble(std::bit_cast<double>(bits))));
}

void Machine::long_integer() {
  const std::string_view bytes = exactly(byte());
  if (bytes.empty() || bytes.size() > sizeof(std::int64_t)) throw Declined{};
  const std::size_t n_unused = 8 * (sizeof(std::int64_t) - bytes.size());
  const std::uint64_t shifted = little_endian(bytes) << n_unused;
  push(Object::checked(PyLong_FromLongLong(static_cast<std::int64_t>(shifted) >> n_unused)));
}

void Machine::text() {
  const std::string_view bytes = exactly(number<std::uint32_t>());
  push(Object::checked(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogatepass")));
}

void Machine::make_tuple(std::size_t n) {
  if (n > 0) top(n);
  const std::span<Part> parts = std::span(stack_).last(n);
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
  push(std::move(tuple));
}

std::uint32_t Machine::new_arguments() {
  if (free_arguments_.empty()) {
    arguments_.emplace_back();
    return static_cast<std::uint32_t>(arguments_.size() - 1);
  }
  const std::uint32_t index = free_arguments_.back();
  free_arguments_.pop_back();
  return index;
}

// Recycles popped arguments that are not in the memo.
void Machine::done_with(const Part& arguments) {
  if (arguments.kind != Kind::kArguments || arguments_[arguments.index].is_kept) return;
  arguments_[arguments.index].parts.clear();
  free_arguments_.push_back(arguments.index);
}

// Whether the next steps make a tuple of all values down to a mark, after at most an unused PUT.
bool Machine::makes_tuple_next() {
  PickleCursor ahead = cursor_;
  if (ahead.at_end()) return false;
  unsigned char code = ahead.byte();
  if (code == opcode::kBinPut || code == opcode::kLongBinPut) {
    const std::size_t n = code == opcode::kBinPut ? 1 : 4;
    const std::string_view operand = ahead.take(n);
    if (operand.size() < n || ahead.at_end() ||
        reads_.is_read(static_cast<std::uint32_t>(little_endian(operand)))) {
      return false;
    }
    code = ahead.byte();
  }
  return code == opcode::kTuple && stack_.size() > base();
}

void Machine::append(std::size_t n) {
  const std::span<Part> items = last(n);
  PyObject* const list = top(n + 1).object.get();
  if (top(n + 1).kind != Kind::kObject || !PyList_CheckExact(list)) throw Declined{};
  for (const Part& item : items) {
    if (!item.is_object()) throw Declined{};
    checked(PyList_Append(list, item.object.get()));
  }
  drop(n);
}

void Machine::set_items(std::size_t n) {
  const std::span<Part> items = last(n);
  PyObject* const dict = top(n + 1).object.get();
  if (top(n + 1).kind != Kind::kObject || n % 2 != 0) throw Declined{};
  const bool is_ordered = PyODict_CheckExact(dict);
  if (!is_ordered && !PyDict_CheckExact(dict)) throw Declined{};
  for (std::size_t i = 0; i < n; i += 2) {
    PyObject* const key = items[i].object.get();
    if (items[i].kind != Kind::kObject || !is_plain_key(key) || !items[i + 1].is_object()) {
      throw Declined{};
    }
    const auto set = is_ordered ? &PyODict_SetItem : &PyDict_SetItem;
    checked(set(dict, key, items[i + 1].object.get()));
  }
  drop(n);
}

void Machine::global() {
  const std::string_view module = cursor_.line();
  const std::string_view name = cursor_.line();
  if (!name.ends_with('\n')) throw Declined{};
  const std::string_view lines(module.data(), module.size() + name.size());
  const auto known = globals_.find(lines);
  if (known != globals_.end()) return push(known->second);
  Part value;
  if (lines == "collections\nOrderedDict\n") value.kind = Kind::kOrderedDict;
  if (lines == "torch._utils\n_rebuild_tensor_v2\n") value.kind = Kind::kRebuild;
  if (lines == "torch._utils\n_rebuild_tensor_v3\n") value.kind = Kind::kRebuildV3;
  if (lines == "torch._utils\n_rebuild_parameter\n") value.kind = Kind::kParameter;
  if (lines == "torch.storage\nUntypedStorage\n" || lines == "torch\nUntypedStorage\n") {
    value = {.kind = Kind::kStorageType, .index = kDtypes.size(), .object = {}};
  }
  if (module == "torch\n") {
    const std::string_view word = name.substr(0, name.size() - 1);
    for (std::uint32_t i = 0; i < kDtypes.size(); ++i) {
      if (word == kDtypes[i].name) value = {.kind = Kind::kDtype, .index = i, .object = {}};
      if (!word.empty() && word == kDtypes[i].storage) {
        value = {.kind = Kind::kStorageType, .index = i, .object = {}};
      }
    }
  }
  if (value.kind == Kind::kNothing) throw Declined{};
  globals_.emplace(lines, value);
  push(std::move(value));
}

// ("storage", type, key, location, numel)
void Machine::persistent_id() {
  const Part id = pop();
  if (id.kind != Kind::kArguments || arguments_[id.index].parts.size() != 5) throw Declined{};
  const std::vector<Part>& parts = arguments_[id.index].parts;
  if (text_of(parts[0]) != "storage" || parts[1].kind != Kind::kStorageType) throw Declined{};
  const std::uint32_t dtype = parts[1].index;
  const std::int64_t itemsize = dtype < kDtypes.size() ? kDtypes[dtype].itemsize : 1;
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

void Machine::reduce() {
  const Part arguments = pop();
  const Part function = pop();
  if (function.kind == Kind::kOrderedDict) {
    if (arguments.kind != Kind::kObject || !PyTuple_CheckExact(arguments.object.get()) ||
        PyTuple_GET_SIZE(arguments.object.get()) != 0) {
      throw Declined{};
    }
    // Probably a tensor's hooks, which the outline does not need.
    if (makes_tuple_next()) return push(Part{.kind = Kind::kNewDict, .index = 0, .object = {}});
    return push(Object::checked(PyODict_New()));
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

// `arguments` are (storage, offset, size, stride, requires_grad, hooks), and possibly the dtype.
Part Machine::new_tensor(std::span<const Part> arguments, bool has_dtype) {
  if (arguments.size() != (has_dtype ? 7 : 6) || arguments[0].kind != Kind::kStorage) {
    throw Declined{};
  }
  const Storage& storage = storages_[arguments[0].index];
  std::uint32_t dtype = storage.dtype;
  if (has_dtype) {
    if (arguments[6].kind != Kind::kDtype) throw Declined{};
    dtype = arguments[6].index;
  }
  if (dtype >= kDtypes.size()) dtype = 0;  // an untyped storage counts as uint8
  PyObject* const requires_grad = arguments[4].object.get();
  const bool is_flag = requires_grad == Py_False ||
                       (requires_grad == Py_True && kDtypes[dtype].can_require_grad && !has_dtype);
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

// `geometry` is the offset, size and stride.
Object Machine::facts_of(const Storage& storage, std::uint32_t dtype,
                         std::span<const Part> geometry) {
  const std::int64_t itemsize = kDtypes[dtype].itemsize;
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

// (tensor, requires_grad, hooks)
Part Machine::parameter(std::span<const Part> arguments) const {
  if (arguments.size() != 3 || arguments[0].kind != Kind::kTensor ||
      !PyBool_Check(arguments[1].object.get()) || !PyODict_CheckExact(arguments[2].object.get())) {
    throw Declined{};
  }
  PyObject* const facts = PyStructSequence_GET_ITEM(arguments[0].object.get(), 0);
  PyObject* const name = PyTuple_GET_ITEM(facts, 0);
  const auto known = std::ranges::find(dtype_names_, name, &Object::get);
  const Dtype& dtype = kDtypes[static_cast<std::size_t>(known - dtype_names_.begin())];
  if (arguments[1].object.get() == Py_True && !dtype.can_require_grad) throw Declined{};
  // A new object in the tensor's storage.
  Object tensor = Object::checked(PyStructSequence_New(tensor_type_));
  PyObject* const place = PyStructSequence_GET_ITEM(arguments[0].object.get(), 1);
  PyStructSequence_SET_ITEM(tensor.get(), 0, Py_NewRef(facts));
  PyStructSequence_SET_ITEM(tensor.get(), 1, Py_NewRef(place));
  return value_of(std::move(tensor), Kind::kTensor);
}

// Ignores attributes of an OrderedDict, such as a state dict's `_metadata`: they are no entries.
void Machine::build() {
  const Part state = pop();
  const Part& target = top();
  if (state.kind != Kind::kObject || target.kind != Kind::kObject ||
      !PyDict_CheckExact(state.object.get()) || !PyODict_CheckExact(target.object.get())) {
    throw Declined{};
  }
}

}  // namespace

Object make_outlined_tensor_type() {
  static PyStructSequence_Field fields[] = {
      {"facts", "(dtype, shape, stride, offset in the storage, size, size of the storage)"},
      {"place", "that of its storage; None for an empty one"},
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
