// The fast steps are here; every other one is a small pickle that torch's own machine runs.
#include "pickle/unpickler.h"

#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pickle/memo.h"
#include "pickle/opcodes.h"
#include "pickle/storage_references.h"
#include "pickle/tensor_rebuild.h"
#include "pickle/torch_machine.h"

namespace ptsave {
namespace {

// How many steps are taken before signals are handled and other threads may run: some milliseconds.
constexpr std::uint32_t kStepsInARow = 1 << 16;
// Python hashes a tuple recursively without a look at the C stack, which has overflowed at 60,000
// to 100,000 levels.
constexpr std::uint32_t kMaxHashedDepth = 10'000;

[[noreturn]] void fail(PyObject* type, const char* message) {
  PyErr_SetString(type, message);
  throw PythonError{};
}

class Machine {
 public:
  Machine(std::string_view pickle, PyObject* persistent_load, PyObject* encoding,
          StorageSource* source)
      : cursor_(pickle),
        torch_(persistent_load, encoding, collector_pause_),
        globals_(torch_),
        storages_(source, torch_),
        rebuilder_(storages_),
        memo_(pickle) {}

  Object run();

 private:
  using Step = void (Machine::*)();
  using Steps = std::array<Step, 256>;

  static constexpr Steps steps();
  static const Steps kSteps;

  // Whose fault an exception is: if the pickle's, its place in the pickle is noted.
  enum class Blame : std::uint8_t { kPickle, kPickleUnlessRuntimeError, kNobody };

  void note_offset() const;
  void let_others_run();

  // ---- the stack; torch's machine has one list for each mark and looks into the last one only

  std::size_t depth() const { return stack_.size() - base_; }
  void push(Object object) { stack_.emplace_back(std::move(object)); }
  void push_borrowed(PyObject* object) { push(Object::borrow(object)); }
  Value pop();
  Object pop_object();
  Value& top();
  PyObject* top_object();
  std::size_t pop_mark();
  void drop(std::size_t n) { stack_.resize(stack_.size() - n); }
  std::span<Value> last(std::size_t n) { return std::span(stack_).last(n); }
  void make_objects(std::span<Value> values);

  // ---- operands

  std::string_view exactly(std::size_t n);
  unsigned char operand_byte();
  std::uint32_t operand_32() { return static_cast<std::uint32_t>(little_endian(exactly(4))); }

  // ---- constants

  template <class Number>
  void integer();
  void push_none() { push_borrowed(Py_None); }
  void push_true() { push_borrowed(Py_True); }
  void push_false() { push_borrowed(Py_False); }
  void real();
  void long_integer();
  void text();
  void short_string();
  Object run_counted(std::string_view bytes) const;

  // ---- stack and memo

  void protocol();
  void mark();
  void put_short() { put(operand_byte()); }
  void put_long() { put(operand_32()); }
  void get_short() { get(operand_byte()); }
  void get_long() { get(operand_32()); }
  void put(std::uint32_t i);
  void get(std::uint32_t i);

  // ---- containers

  void empty_tuple() { push(Object::checked(PyTuple_New(0))); }
  void empty_list() { push(Object::checked(PyList_New(0))); }
  void empty_dict() { push(Object::checked(PyDict_New())); }
  void empty_set() { push(Object::checked(PySet_New(nullptr))); }
  template <std::size_t N>
  void tuple_of();
  void marked_tuple() { make_tuple(pop_mark()); }
  void make_tuple(std::size_t n);
  void note_depth(PyObject* tuple);
  void append();
  void appends();
  void set_item();
  void set_items();
  bool store_items(PyObject* target, std::size_t n);
  void check_hashable(PyObject* key) const;

  // ---- everything that runs code

  bool consume_tuple(std::size_t n);
  bool refer_to_storage(std::span<const Value> id);
  void global();
  void persistent_id();
  void reduce();
  Object call(PyObject* function, PyObject* arguments);
  void new_object();
  void build();
  void unsupported();
  void refuse_deep_tuples() const;

  Object stop() { return pop_object(); }

  PickleCursor cursor_;
  CollectorPause collector_pause_;
  TorchMachine torch_;
  Globals globals_;
  StorageReferences storages_;
  TensorRebuilder rebuilder_;
  Memo memo_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;  // the values of base_ outside each mark
  std::size_t base_ = 0;            // size of the stack at the topmost mark
  // Depth of tuples in tuples; what is not here counts as one level.
  std::unordered_map<PyObject*, std::uint32_t> depths_;
  std::uint32_t max_depth_ = 0;
  std::size_t opcode_offset_ = 0;
  unsigned char opcode_ = 0;
  Blame blame_ = Blame::kPickle;
};

// ------------------------------------------------------------------------------------- running

Object Machine::run() {
  try {
    for (std::uint32_t n = kStepsInARow;; --n) {
      if (n == 0) {
        let_others_run();
        n = kStepsInARow;
      }
      opcode_offset_ = cursor_.position();
      if (cursor_.at_end()) {
        PyErr_SetNone(PyExc_EOFError);
        throw PythonError{};
      }
      opcode_ = cursor_.byte();
      if (opcode_ == opcode::kStop) return stop();
      (this->*kSteps[opcode_])();
    }
  } catch (const PythonError&) {
    note_offset();
    throw;
  }
}

void Machine::note_offset() const {
  if (blame_ == Blame::kNobody || PyErr_ExceptionMatches(PyExc_Exception) == 0) return;
  if (blame_ == Blame::kPickleUnlessRuntimeError &&
      PyErr_ExceptionMatches(PyExc_RuntimeError) != 0) {
    return;
  }
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* const offset = PyLong_FromSize_t(opcode_offset_);
  if (offset == nullptr || PyObject_SetAttrString(value, "pickle_offset", offset) < 0) {
    PyErr_Clear();  // one that takes no attributes goes without
  }
  Py_XDECREF(offset);
  PyErr_Restore(type, value, traceback);
}

void Machine::let_others_run() {
  blame_ = Blame::kNobody;
  {
    const CollectorResumed resumed(collector_pause_);
    checked(PyErr_CheckSignals());
    Py_BEGIN_ALLOW_THREADS;
    Py_END_ALLOW_THREADS;
  }
  blame_ = Blame::kPickle;
}

// ------------------------------------------------------------------------------------- the stack

Value Machine::pop() {
  if (depth() == 0) fail(PyExc_IndexError, "pop from empty list");
  Value value = std::move(stack_.back());
  stack_.pop_back();
  return value;
}

Value& Machine::top() {
  if (depth() == 0) fail(PyExc_IndexError, "list index out of range");
  return stack_.back();
}

PyObject* Machine::top_object() {
  Value& value = top();
  make_objects({&value, 1});
  return value.get();
}

// How many values lie above the mark.
std::size_t Machine::pop_mark() {
  if (marks_.empty()) fail(PyExc_IndexError, "pop from empty list");
  const std::size_t n = depth();
  base_ = marks_.back();
  marks_.pop_back();
  return n;
}

Object Machine::pop_object() {
  Value value = pop();
  make_objects({&value, 1});
  return std::move(value).object();
}

void Machine::make_objects(std::span<Value> values) {
  for (Value& value : values) {
    if (!value.is_storage()) continue;
    blame_ = Blame::kNobody;
    value = Value(storages_.as_object(value.storage_index()));
    blame_ = Blame::kPickle;
  }
}

// ------------------------------------------------------------------------------------- operands

std::string_view Machine::exactly(std::size_t n) {
  const std::string_view bytes = cursor_.take(n);
  if (bytes.size() < n) {
    const Object module = import_module("struct");
    PyErr_Format(attribute(module, "error").get(), "unpack requires a buffer of %zu bytes", n);
    throw PythonError{};
  }
  return bytes;
}

unsigned char Machine::operand_byte() {
  if (cursor_.at_end()) fail(PyExc_IndexError, "index out of range");
  return cursor_.byte();
}

// ------------------------------------------------------------------------------------- constants

template <class Number>
void Machine::integer() {
  Number number = 0;
  if constexpr (sizeof(Number) == 1) {
    number = operand_byte();
  } else {
    number = static_cast<Number>(little_endian(exactly(sizeof(Number))));
  }
  push(Object::checked(PyLong_FromLong(number)));
}

void Machine::real() {
  std::uint64_t bits = 0;
  for (const char byte : exactly(sizeof(double)))
    bits = bits << 8 | static_cast<unsigned char>(byte);
  push(Object::checked(PyFloat_FromDouble(std::bit_cast<double>(bits))));
}

void Machine::long_integer() {
  const std::string_view bytes = cursor_.take(operand_byte());
  if (bytes.size() <= sizeof(std::int64_t)) {
    const std::size_t n_unused = 8 * (sizeof(std::int64_t) - bytes.size());
    const std::uint64_t shifted = n_unused == 64 ? 0 : little_endian(bytes) << n_unused;
    const std::int64_t number = n_unused == 64 ? 0 : static_cast<std::int64_t>(shifted) >> n_unused;
    push(Object::checked(PyLong_FromLongLong(number)));
  } else {
    push(run_counted(bytes));
  }
}

void Machine::text() {
  const std::string_view bytes = cursor_.take(operand_32());
  push(Object::checked(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogatepass")));
}

void Machine::short_string() { push(run_counted(cursor_.take(operand_byte()))); }

// The current opcode, whose operand is at most 255 counted bytes, on torch's machine.
Object Machine::run_counted(std::string_view bytes) const {
  std::string program{static_cast<char>(opcode_), static_cast<char>(bytes.size())};
  return torch_.run(program.append(bytes).append("."));
}

// -------------------------------------------------------------------------------- stack and memo

void Machine::protocol() {
  const unsigned char version = operand_byte();
  if (version == 2) return;
  const char program[] = {static_cast<char>(opcode::kProto), static_cast<char>(version), 'N', '.'};
  blame_ = Blame::kNobody;
  torch_.run({program, std::size(program)});  // warns
  blame_ = Blame::kPickle;
}

void Machine::mark() {
  marks_.push_back(base_);
  base_ = stack_.size();
}

void Machine::put(std::uint32_t i) {
  const Value& value = top();
  if (memo_.is_read(i)) memo_.put(i, value);
}

void Machine::get(std::uint32_t i) {
  const Value* const value = memo_.get(i);
  if (value == nullptr) {
    const Object key = Object::checked(PyLong_FromUnsignedLong(i));
    PyErr_SetObject(PyExc_KeyError, key.get());
    throw PythonError{};
  }
  stack_.push_back(*value);
}

// ------------------------------------------------------------------------------------ containers

template <std::size_t N>
void Machine::tuple_of() {
  if (depth() < N) fail(PyExc_IndexError, "list index out of range");
  make_tuple(N);
}

void Machine::make_tuple(std::size_t n) {
  if (consume_tuple(n)) return;
  make_objects(last(n));
  Object tuple = Object::checked(PyTuple_New(static_cast<Py_ssize_t>(n)));
  Py_ssize_t i = 0;
  for (const Value& value : last(n)) PyTuple_SET_ITEM(tuple.get(), i++, Py_NewRef(value.get()));
  note_depth(tuple.get());
  drop(n);
  push(std::move(tuple));
}

void Machine::note_depth(PyObject* tuple) {
  std::uint32_t depth = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* const part = PyTuple_GET_ITEM(tuple, i);
    if (!PyTuple_CheckExact(part)) continue;
    const auto found = depths_.find(part);
    depth = std::max(depth, found == depths_.end() ? 2U : found->second + 1);
  }
  if (depth > 1) {
    depths_.insert_or_assign(tuple, depth);
    max_depth_ = std::max(max_depth_, depth);
  } else if (!depths_.empty()) {
    depths_.erase(tuple);  // of a tuple that was at this address
  }
}

void Machine::check_hashable(PyObject* key) const {
  if (max_depth_ <= kMaxHashedDepth || !PyTuple_CheckExact(key)) return;
  const auto found = depths_.find(key);
  if (found != depths_.end() && found->second > kMaxHashedDepth) {
    fail(PyExc_RecursionError, "a key is a tuple of too many levels");
  }
}

void Machine::append() {
  const Object item = pop_object();
  PyObject* const list = top_object();
  if (PyList_CheckExact(list)) {
    checked(PyList_Append(list, item.get()));
  } else {
    torch_.run(std::string_view("h\0h\1a.", 6), {list, item.get()});
  }
}

void Machine::appends() {
  const std::size_t n = pop_mark();
  if (depth() == n) fail(PyExc_IndexError, "list index out of range");
  make_objects(last(n + 1));
  PyObject* const list = last(n + 1).front().get();
  if (!PyList_CheckExact(list)) {
    torch_.run(std::string_view("h\0(e.", 5), {list});
    fail(PyExc_TypeError, "APPENDS to this type is not known to ptsave");
  }
  for (const Value& item : last(n)) checked(PyList_Append(list, item.get()));
  drop(n);
}

// False if `target` is of a type whose items torch must set.
bool Machine::store_items(PyObject* target, std::size_t n) {
  const bool is_dict = PyDict_CheckExact(target);
  if (!is_dict && !PyODict_CheckExact(target)) return false;
  const std::span<Value> items = last(n);
  for (std::size_t i = 0; i < n; i += 2) {
    if (i + 1 == n) fail(PyExc_IndexError, "list index out of range");
    PyObject* const key = items[i].get();
    check_hashable(key);
    if (is_dict) {
      checked(PyDict_SetItem(target, key, items[i + 1].get()));
    } else {
      checked(PyODict_SetItem(target, key, items[i + 1].get()));
    }
  }
  return true;
}

void Machine::set_item() {
  if (depth() < 2) fail(PyExc_IndexError, "pop from empty list");
  if (depth() == 2) fail(PyExc_IndexError, "list index out of range");
  const std::span<Value> values = last(3);
  make_objects(values);
  if (!store_items(values[0].get(), 2)) {
    refuse_deep_tuples();
    torch_.run(std::string_view("h\0h\1h\2s.", 8),
               {values[0].get(), values[1].get(), values[2].get()});
  }
  drop(2);
}

void Machine::set_items() {
  const std::size_t n = pop_mark();
  if (depth() == n) fail(PyExc_IndexError, "list index out of range");
  make_objects(last(n + 1));
  PyObject* const target = last(n + 1).front().get();
  if (!store_items(target, n)) {
    torch_.run(std::string_view("h\0(u.", 5), {target});  // refuses it, unless it is a Counter
    for (std::size_t i = 0; i < n; i += 2) {
      if (i + 1 == n) fail(PyExc_IndexError, "list index out of range");
      check_hashable(last(n)[i].get());
      checked(PyObject_SetItem(target, last(n)[i].get(), last(n)[i + 1].get()));
    }
  }
  drop(n);
}

// --------------------------------------------------------------------- everything that runs code

// A tuple of the last n values is to be made.  If nothing but the next opcode can use it, and that
// one knows what to do with the values, there is no need for the tuple.
bool Machine::consume_tuple(std::size_t n) {
  PickleCursor ahead = cursor_;
  const auto next = [&ahead] { return ahead.at_end() ? opcode::kStop : ahead.byte(); };
  unsigned char op = next();
  if (op == opcode::kBinPut || op == opcode::kLongBinPut) {
    const std::size_t nbytes = op == opcode::kBinPut ? 1 : 4;
    const std::string_view operand = ahead.take(nbytes);
    if (operand.size() < nbytes) return false;
    if (memo_.is_read(static_cast<std::uint32_t>(little_endian(operand)))) return false;
    op = next();
  }
  if (op == opcode::kBinPersId) {
    if (!refer_to_storage(last(n))) return false;
  } else if (op == opcode::kReduce && depth() > n) {
    const Value& function = last(n + 1).front();
    const Rebuild rebuild =
        function.is_storage() ? Rebuild::kNone : globals_.rebuild_of(function.get());
    if (rebuild == Rebuild::kNone) return false;
    Object object = rebuilder_.rebuild(rebuild, last(n));
    if (!object) return false;
    drop(n + 1);
    push(std::move(object));
  } else {
    return false;
  }
  cursor_ = ahead;
  return true;
}

bool Machine::refer_to_storage(std::span<const Value> id) {
  std::array<PyObject*, 5> parts{};
  if (id.size() != parts.size()) return false;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (id[i].is_storage()) return false;
    parts[i] = id[i].get();
  }
  const std::optional<std::size_t> index = storages_.find(parts);
  if (!index) return false;
  drop(parts.size());
  stack_.push_back(Value::storage(*index));
  return true;
}

void Machine::persistent_id() {
  const Object id = pop_object();
  if (PyTuple_CheckExact(id.get())) {
    const auto n = static_cast<std::size_t>(PyTuple_GET_SIZE(id.get()));
    const std::span parts(&PyTuple_GET_ITEM(id.get(), 0), n);
    if (const std::optional<std::size_t> index = storages_.find(parts)) {
      stack_.push_back(Value::storage(*index));
      return;
    }
  }
  refuse_deep_tuples();
  storages_.leave_to_torch(id.get());
  if (storages_.is_well_formed(id.get())) blame_ = Blame::kNobody;
  push(torch_.run(std::string_view("h\0Q.", 4), {id.get()}));
  blame_ = Blame::kPickle;
}

void Machine::global() {
  const std::size_t start = cursor_.position();
  PickleCursor lines = cursor_;
  const std::string_view module = cursor_.line();
  const std::string_view name = cursor_.line();
  const std::string_view both = lines.take(cursor_.position() - start);
  if (!module.ends_with('\n') || !name.ends_with('\n')) {
    torch_.run(std::string("c").append(both));  // fails: torch takes the last letter for a newline
    fail(PyExc_EOFError, "");
  }
  push(globals_.resolve(both));
}

void Machine::reduce() {
  const Object arguments = pop_object();
  const Object function = Object::borrow(top_object());
  stack_.back() = Value(call(function.get(), arguments.get()));
}

Object Machine::call(PyObject* function, PyObject* arguments) {
  const bool is_default = globals_.is_default(function);
  if (is_default && PyTuple_CheckExact(arguments)) {
    if (function == reinterpret_cast<PyObject*>(&PyODict_Type) &&
        PyTuple_GET_SIZE(arguments) == 0) {
      return Object::checked(PyODict_New());
    }
    const Rebuild rebuild = globals_.rebuild_of(function);
    if (rebuild == Rebuild::kQuantized) check_quantized(arguments);
    if (rebuild != Rebuild::kNone || function == reinterpret_cast<PyObject*>(&THPSizeType)) {
      return torch_.call(function, arguments);
    }
  }
  refuse_deep_tuples();
  blame_ = is_default ? Blame::kPickleUnlessRuntimeError : Blame::kNobody;
  Object result = torch_.run(std::string_view("h\0h\1R.", 6), {function, arguments});
  blame_ = Blame::kPickle;
  return result;
}

void Machine::new_object() {
  const Object arguments = pop_object();
  const Object type = pop_object();
  refuse_deep_tuples();
  blame_ = globals_.is_default(type.get()) ? Blame::kPickleUnlessRuntimeError : Blame::kNobody;
  push(torch_.run(std::string_view("h\0h\1\x81.", 6), {type.get(), arguments.get()}));
  blame_ = Blame::kPickle;
}

void Machine::build() {
  const Object state = pop_object();
  PyObject* const object = top_object();
  if (PyODict_CheckExact(object) && PyDict_CheckExact(state.get())) {
    const Object attributes = Object::checked(PyObject_GenericGetDict(object, nullptr));
    checked(PyDict_Update(attributes.get(), state.get()));
    return;
  }
  refuse_deep_tuples();
  if (!PyODict_CheckExact(object) && !THPVariable_CheckExact(object)) blame_ = Blame::kNobody;
  torch_.run(std::string_view("h\0h\1b.", 6), {object, state.get()});
  blame_ = Blame::kPickle;
}

void Machine::unsupported() {
  const char op = static_cast<char>(opcode_);
  torch_.run({&op, 1});
  PyErr_Format(PyExc_RuntimeError, "ptsave does not know opcode %d", int{opcode_});
  throw PythonError{};
}

void Machine::refuse_deep_tuples() const {
  if (max_depth_ > kMaxHashedDepth) {
    fail(PyExc_RecursionError, "there are tuples of too many levels for a call that may hash them");
  }
}

constexpr Machine::Steps Machine::steps() {
  Steps steps{};
  steps.fill(&Machine::unsupported);
  steps[opcode::kProto] = &Machine::protocol;
  steps[opcode::kMark] = &Machine::mark;
  steps[opcode::kNone] = &Machine::push_none;
  steps[opcode::kNewTrue] = &Machine::push_true;
  steps[opcode::kNewFalse] = &Machine::push_false;
  steps[opcode::kBinInt] = &Machine::integer<std::int32_t>;
  steps[opcode::kBinInt1] = &Machine::integer<std::uint8_t>;
  steps[opcode::kBinInt2] = &Machine::integer<std::uint16_t>;
  steps[opcode::kLong1] = &Machine::long_integer;
  steps[opcode::kBinFloat] = &Machine::real;
  steps[opcode::kBinUnicode] = &Machine::text;
  steps[opcode::kShortBinString] = &Machine::short_string;
  steps[opcode::kBinPut] = &Machine::put_short;
  steps[opcode::kLongBinPut] = &Machine::put_long;
  steps[opcode::kBinGet] = &Machine::get_short;
  steps[opcode::kLongBinGet] = &Machine::get_long;
  steps[opcode::kEmptyTuple] = &Machine::empty_tuple;
  steps[opcode::kEmptyList] = &Machine::empty_list;
  steps[opcode::kEmptyDict] = &Machine::empty_dict;
  steps[opcode::kEmptySet] = &Machine::empty_set;
  steps[opcode::kTuple] = &Machine::marked_tuple;
  steps[opcode::kTuple1] = &Machine::tuple_of<1>;
  steps[opcode::kTuple2] = &Machine::tuple_of<2>;
  steps[opcode::kTuple3] = &Machine::tuple_of<3>;
  steps[opcode::kAppend] = &Machine::append;
  steps[opcode::kAppends] = &Machine::appends;
  steps[opcode::kSetItem] = &Machine::set_item;
  steps[opcode::kSetItems] = &Machine::set_items;
  steps[opcode::kGlobal] = &Machine::global;
  steps[opcode::kBinPersId] = &Machine::persistent_id;
  steps[opcode::kReduce] = &Machine::reduce;
  steps[opcode::kNewObj] = &Machine::new_object;
  steps[opcode::kBuild] = &Machine::build;
  return steps;
}

constexpr Machine::Steps Machine::kSteps = Machine::steps();

}  // namespace

Object unpickle_weights_only(std::string_view pickle, PyObject* persistent_load, PyObject* encoding,
                             StorageSource* storages) {
  return Machine(pickle, persistent_load, encoding, storages).run();
}

}  // namespace ptsave
