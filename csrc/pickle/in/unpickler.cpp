#include "pickle/in/unpickler.h"

#include <Python.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <bit>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "pickle/common/opcodes.h"
#include "pickle/in/tensor_rebuild.h"
#include "pickle/in/torch_machine.h"
#include "pickle/in/values.h"

namespace ptsave {
namespace {

// After this many bytes of the pickle (some milliseconds), signals are handled and other threads
// may run.
constexpr std::size_t kBytesInARow = std::size_t{128} << 10;

// Does nothing for an exception that takes no attributes.
void set_offset(PyObject* exception, PyObject* offset) {
  if (offset == nullptr || PyObject_SetAttrString(exception, "pickle_offset", offset) < 0) {
    PyErr_Clear();
  }
}

// The machine behind unpickle_weights_only().  Takes the fast steps itself, and leaves all other
// steps to torch's machine.  One per load.  Needs the GIL.
class RestrictedMachine {
 public:
  RestrictedMachine(std::string_view pickle, PyObject* persistent_load, PyObject* encoding,
                    StorageSource* source, PyObject* unpickler_type)
      : cursor_(pickle),
        torch_(persistent_load, encoding, unpickler_type, collector_pause_),
        globals_(torch_),
        storages_(source, torch_),
        rebuilder_(storages_),
        memo_(pickle) {}

  Object run() {
    try {
      for (std::size_t pause = kBytesInARow;;) {
        opcode_offset_ = cursor_.position();
        if (opcode_offset_ >= pause) {
          let_others_run();
          pause = opcode_offset_ + kBytesInARow;
        }
        if (cursor_.at_end()) {
          PyErr_SetNone(PyExc_EOFError);
          throw PythonError{};
        }
        opcode_ = cursor_.byte();
        if (opcode_ == opcode::kStop) return pop_object();
        (this->*kSteps[opcode_])();
      }
    } catch (const PythonError&) {
      note_offset();
      throw;
    }
  }

 private:
  using Step = void (RestrictedMachine::*)();
  using Steps = std::array<Step, 256>;

  static constexpr Steps steps() {
    Steps steps{};
    steps.fill(&RestrictedMachine::unsupported);
    steps[opcode::kProto] = &RestrictedMachine::protocol;
    steps[opcode::kMark] = &RestrictedMachine::mark;
    steps[opcode::kNone] = &RestrictedMachine::push_none;
    steps[opcode::kNewTrue] = &RestrictedMachine::push_true;
    steps[opcode::kNewFalse] = &RestrictedMachine::push_false;
    steps[opcode::kBinInt] = &RestrictedMachine::integer<std::int32_t>;
    steps[opcode::kBinInt1] = &RestrictedMachine::integer<std::uint8_t>;
    steps[opcode::kBinInt2] = &RestrictedMachine::integer<std::uint16_t>;
    steps[opcode::kLong1] = &RestrictedMachine::long_integer;
    steps[opcode::kBinFloat] = &RestrictedMachine::real;
    steps[opcode::kBinUnicode] = &RestrictedMachine::text;
    steps[opcode::kShortBinString] = &RestrictedMachine::short_string;
    steps[opcode::kBinPut] = &RestrictedMachine::put_short;
    steps[opcode::kLongBinPut] = &RestrictedMachine::put_long;
    steps[opcode::kBinGet] = &RestrictedMachine::get_short;
    steps[opcode::kLongBinGet] = &RestrictedMachine::get_long;
    steps[opcode::kEmptyTuple] = &RestrictedMachine::empty_tuple;
    steps[opcode::kEmptyList] = &RestrictedMachine::empty_list;
    steps[opcode::kEmptyDict] = &RestrictedMachine::empty_dict;
    steps[opcode::kEmptySet] = &RestrictedMachine::empty_set;
    steps[opcode::kTuple] = &RestrictedMachine::marked_tuple;
    steps[opcode::kTuple1] = &RestrictedMachine::tuple_of<1>;
    steps[opcode::kTuple2] = &RestrictedMachine::tuple_of<2>;
    steps[opcode::kTuple3] = &RestrictedMachine::tuple_of<3>;
    steps[opcode::kAppend] = &RestrictedMachine::append;
    steps[opcode::kAppends] = &RestrictedMachine::appends;
    steps[opcode::kSetItem] = &RestrictedMachine::set_item;
    steps[opcode::kSetItems] = &RestrictedMachine::set_items;
    steps[opcode::kGlobal] = &RestrictedMachine::global;
    steps[opcode::kBinPersId] = &RestrictedMachine::persistent_id;
    steps[opcode::kReduce] = &RestrictedMachine::reduce;
    steps[opcode::kNewObj] = &RestrictedMachine::new_object;
    steps[opcode::kBuild] = &RestrictedMachine::build;
    return steps;
  }

  static const Steps kSteps;

  // The cause of an exception.  If the pickle is the cause, the exception gets the offset in the
  // pickle.
  enum class Blame : std::uint8_t { kPickle, kPickleUnlessRuntimeError, kNobody };

  void note_offset() const {
    if (blame_ == Blame::kNobody || PyErr_ExceptionMatches(PyExc_Exception) == 0) return;
    if (blame_ == Blame::kPickleUnlessRuntimeError &&
        PyErr_ExceptionMatches(PyExc_RuntimeError) != 0) {
      return;
    }
    const Object offset = Object::steal(PyLong_FromSize_t(opcode_offset_));
#if PY_VERSION_HEX >= 0x030C0000
    PyObject* const value = PyErr_GetRaisedException();
    set_offset(value, offset.get());
    PyErr_SetRaisedException(value);
#else
    PyObject* type = nullptr;
    PyObject* value = nullptr;
    PyObject* traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    set_offset(value, offset.get());
    PyErr_Restore(type, value, traceback);
#endif
  }

  void let_others_run() {
    blame_ = Blame::kNobody;
    {
      const CollectorResumed resumed(collector_pause_);
      checked(PyErr_CheckSignals());
      Py_BEGIN_ALLOW_THREADS;
      Py_END_ALLOW_THREADS;
    }
    blame_ = Blame::kPickle;
  }

  // ---- the stack; a value must be an object before it is passed to Python

  void push_borrowed(PyObject* object) { stack_.push(Object::borrow(object)); }
  Object pop_object() {
    Value value = stack_.pop();
    make_objects({&value, 1});
    return std::move(value).object();
  }
  PyObject* top_object() {
    Value& value = stack_.top();
    make_objects({&value, 1});
    return value.get();
  }
  void make_objects(std::span<Value> values) {
    for (Value& value : values) {
      if (!value.is_storage()) continue;
      blame_ = Blame::kNobody;
      value = Value(storages_.as_object(value.storage_index()));
      blame_ = Blame::kPickle;
    }
  }

  // ---- operands

  std::string_view exactly(std::size_t n) {
    const std::string_view bytes = cursor_.take(n);
    if (bytes.size() < n) {
      const Object module = import_module("struct");
      PyErr_Format(attribute(module, "error").get(), "unpack requires a buffer of %zu bytes", n);
      throw PythonError{};
    }
    return bytes;
  }
  unsigned char operand_byte() {
    if (cursor_.at_end()) fail(PyExc_IndexError, "index out of range");
    return cursor_.byte();
  }
  std::uint32_t operand_32() { return static_cast<std::uint32_t>(little_endian(exactly(4))); }

  // ---- constants

  template <class Number>
  void integer() {
    Number number = 0;
    if constexpr (sizeof(Number) == 1) {
      number = operand_byte();
    } else {
      number = static_cast<Number>(little_endian(exactly(sizeof(Number))));
    }
    stack_.push(Object::checked(PyLong_FromLong(number)));
  }
  void push_none() { push_borrowed(Py_None); }
  void push_true() { push_borrowed(Py_True); }
  void push_false() { push_borrowed(Py_False); }
  void real() {
    const double number = big_endian_real(exactly(sizeof(double)));
    stack_.push(Object::checked(PyFloat_FromDouble(number)));
  }
  void long_integer() {
    const std::string_view bytes = cursor_.take(operand_byte());
    if (bytes.size() <= sizeof(std::int64_t)) {
      stack_.push(Object::checked(PyLong_FromLongLong(signed_integer(bytes))));
    } else {
      stack_.push(run_counted(bytes));
    }
  }
  void text() { stack_.push(decoded_text(cursor_.take(operand_32()))); }
  void short_string() { stack_.push(run_counted(cursor_.take(operand_byte()))); }
  // Runs the current opcode, with an operand of at most 255 counted bytes, on torch's machine.
  Object run_counted(std::string_view bytes) const {
    std::string program{static_cast<char>(opcode_), static_cast<char>(bytes.size())};
    return torch_.run(program.append(bytes).append("."));
  }

  // ---- stack and memo

  void protocol() {
    const unsigned char version = operand_byte();
    if (version == 2) return;
    const char program[] = {static_cast<char>(opcode::kProto), static_cast<char>(version), 'N',
                            '.'};
    blame_ = Blame::kNobody;
    torch_.run({program, std::size(program)});  // warns
    blame_ = Blame::kPickle;
  }
  // At the MARK of a tensor's arguments, tries all of its steps at once: torch.save writes the same
  // steps for every plain tensor.
  void mark() {
    const bool is_tensor =
        stack_.depth() > 0 && stack_.last(1).front().get() == globals_.tensor_v2();
    if (!is_tensor || !rebuild_at_once()) stack_.mark();
  }
  void put_short() { put(operand_byte()); }
  void put_long() { put(operand_32()); }
  void get_short() { get(operand_byte()); }
  void get_long() { get(operand_32()); }
  void put(std::uint32_t i) {
    const Value& value = stack_.top();
    if (memo_.is_read(i)) memo_.put(i, value);
  }
  void get(std::uint32_t i) {
    const Value* const value = memo_.get(i);
    if (value == nullptr) {
      const Object key = Object::checked(PyLong_FromUnsignedLong(i));
      PyErr_SetObject(PyExc_KeyError, key.get());
      throw PythonError{};
    }
    stack_.push(*value);
  }

  // ---- containers

  void empty_tuple() { stack_.push(Object::checked(PyTuple_New(0))); }
  void empty_list() { stack_.push(Object::checked(PyList_New(0))); }
  void empty_dict() { stack_.push(Object::checked(PyDict_New())); }
  void empty_set() { stack_.push(Object::checked(PySet_New(nullptr))); }
  template <std::size_t N>
  void tuple_of() {
    stack_.require(N);
    make_tuple(N);
  }
  void marked_tuple() { make_tuple(stack_.pop_mark()); }

  void make_tuple(std::size_t n) {
    if (consume_tuple(n)) return;
    make_objects(stack_.last(n));
    Object tuple = Object::checked(PyTuple_New(static_cast<Py_ssize_t>(n)));
    Py_ssize_t i = 0;
    for (const Value& value : stack_.last(n))
      PyTuple_SET_ITEM(tuple.get(), i++, Py_NewRef(value.get()));
    tuple_nesting_.note(tuple.get());
    stack_.drop(n);
    stack_.push(std::move(tuple));
  }

  void append() {
    const Object item = pop_object();
    PyObject* const list = top_object();
    if (PyList_CheckExact(list)) {
      checked(PyList_Append(list, item.get()));
    } else {
      torch_.run(std::string_view("h\0h\1a.", 6), {list, item.get()});
    }
  }
  void appends() {
    const std::size_t n = stack_.pop_mark();
    stack_.require(n + 1);
    make_objects(stack_.last(n + 1));
    PyObject* const list = stack_.last(n + 1).front().get();
    if (!PyList_CheckExact(list)) {
      torch_.run(std::string_view("h\0(e.", 5), {list});  // refuses it, unless a subclass allows it
      for (const Value& item : stack_.last(n))
        torch_.run(std::string_view("h\0h\1a.", 6), {list, item.get()});
    } else {
      for (const Value& item : stack_.last(n)) checked(PyList_Append(list, item.get()));
    }
    stack_.drop(n);
  }

  void set_item() {
    if (stack_.depth() < 2) fail(PyExc_IndexError, "pop from empty list");
    stack_.require(3);
    const std::span<Value> values = stack_.last(3);
    make_objects(values);
    if (!store_items(values[0].get(), 2)) {
      tuple_nesting_.check_call();
      torch_.run(std::string_view("h\0h\1h\2s.", 8),
                 {values[0].get(), values[1].get(), values[2].get()});
    }
    stack_.drop(2);
  }

  void set_items() {
    const std::size_t n = stack_.pop_mark();
    stack_.require(n + 1);
    make_objects(stack_.last(n + 1));
    PyObject* const target = stack_.last(n + 1).front().get();
    if (!store_items(target, n)) {
      torch_.run(std::string_view("h\0(u.", 5), {target});  // refuses all but a Counter, ...
      for (std::size_t i = 0; i < n; i += 2) {
        if (i + 1 == n) fail(PyExc_IndexError, "list index out of range");
        tuple_nesting_.check_key(stack_.last(n)[i].get());
        checked(PyObject_SetItem(target, stack_.last(n)[i].get(), stack_.last(n)[i + 1].get()));
      }
    }
    stack_.drop(n);
  }

  // Stores items in a dict; false if `target` is of a type for which torch must do it.
  bool store_items(PyObject* target, std::size_t n) {
    const bool is_dict = PyDict_CheckExact(target);
    if (!is_dict && !PyODict_CheckExact(target)) return false;
    const std::span<Value> items = stack_.last(n);
    for (std::size_t i = 0; i < n; i += 2) {
      if (i + 1 == n) fail(PyExc_IndexError, "list index out of range");
      PyObject* const key = items[i].get();
      tuple_nesting_.check_key(key);
      if (is_dict) {
        checked(PyDict_SetItem(target, key, items[i + 1].get()));
      } else {
        checked(PyODict_SetItem(target, key, items[i + 1].get()));
      }
    }
    return true;
  }

  // ---- everything that runs code

  // Takes all steps up to the REDUCE that makes the tensor, if they are the usual ones.  Otherwise
  // the only effect may be that the storage is registered.
  bool rebuild_at_once() {
    if (!globals_.rebuilds_are_torchs()) return false;
    PickleCursor ahead = cursor_;
    const std::optional<TensorSteps> steps = take_tensor_steps(ahead, memo_);
    if (!steps || steps->hooks_type != reinterpret_cast<PyObject*>(&PyODict_Type) ||
        !globals_.is_default(steps->hooks_type)) {
      return false;
    }
    const std::optional<std::size_t> index =
        storages_.find(steps->word, steps->storage_type, steps->key, steps->location, steps->numel);
    if (index) {
      const PlainStorage& storage = storages_[*index];
      return rebuild_over(*storage.storage, storage.type->dtype, *steps, ahead);
    }
    if (steps->numel != 0) return false;
    const std::optional<EmptyStorage> empty =
        storages_.make_empty(steps->word, steps->storage_type, steps->key, steps->location);
    return empty && rebuild_over(empty->storage, empty->type->dtype, *steps, ahead);
  }

  // Pushes the tensor of `steps`, which end at `ahead`; false if torch must make it.
  bool rebuild_over(const c10::Storage& storage, c10::ScalarType dtype, const TensorSteps& steps,
                    const PickleCursor& ahead) {
    const Object hooks = Object::checked(PyODict_New());
    Object tensor = rebuilder_.rebuild({.storage = storage,
                                        .dtype = dtype,
                                        .geometry = steps.geometry,
                                        .requires_grad = steps.requires_grad,
                                        .hooks = hooks.get()});
    if (!tensor) return false;
    stack_.top() = Value(std::move(tensor));
    cursor_ = ahead;
    return true;
  }

  // Tries to avoid making a tuple of the last n values.  If only the next opcode can use that
  // tuple, executes the opcode with the values on the stack.
  bool consume_tuple(std::size_t n) {
    PickleCursor ahead = cursor_;
    if (!memo_.skip_put(ahead) || ahead.at_end()) return false;
    const unsigned char op = ahead.byte();
    if (op == opcode::kBinPersId) {
      if (!refer_to_storage(stack_.last(n))) return false;
    } else if (op == opcode::kReduce && stack_.depth() > n) {
      const Value& function = stack_.last(n + 1).front();
      if (function.is_storage() || !globals_.rebuilds_are_torchs()) return false;
      const Rebuild rebuild = globals_.rebuild_of(function.get());
      if (rebuild == Rebuild::kNone) return false;
      Object object = rebuilder_.rebuild(rebuild, stack_.last(n));
      if (!object) return false;
      stack_.drop(n + 1);
      stack_.push(std::move(object));
    } else {
      return false;
    }
    cursor_ = ahead;
    return true;
  }

  bool refer_to_storage(std::span<const Value> id) {
    std::array<PyObject*, 5> parts{};
    if (id.size() != parts.size()) return false;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (id[i].is_storage()) return false;
      parts[i] = id[i].get();
    }
    const std::optional<std::size_t> index = storages_.find(parts);
    if (!index) return false;
    stack_.drop(parts.size());
    stack_.push(Value::storage(*index));
    return true;
  }

  void global() {
    const std::size_t start = cursor_.position();
    PickleCursor lines = cursor_;
    const std::string_view module = cursor_.line();
    const std::string_view name = cursor_.line();
    const std::string_view both = lines.take(cursor_.position() - start);
    if (!module.ends_with('\n') || !name.ends_with('\n')) {
      torch_.run(std::string("c").append(both));  // fails: torch takes the last letter as a newline
      fail(PyExc_EOFError, "");
    }
    stack_.push(globals_.resolve(both));
  }

  void persistent_id() {
    const Object id = pop_object();
    if (PyTuple_CheckExact(id.get())) {
      const auto n = static_cast<std::size_t>(PyTuple_GET_SIZE(id.get()));
      const std::span parts(reinterpret_cast<PyTupleObject*>(id.get())->ob_item, n);
      if (const std::optional<std::size_t> index = storages_.find(parts)) {
        stack_.push(Value::storage(*index));
        return;
      }
    }
    tuple_nesting_.check_call();
    storages_.leave_to_torch(id.get());
    if (storages_.is_well_formed(id.get())) blame_ = Blame::kNobody;
    stack_.push(torch_.run(std::string_view("h\0Q.", 4), {id.get()}));
    blame_ = Blame::kPickle;
  }

  void reduce() {
    const Object arguments = pop_object();
    const Object function = Object::borrow(top_object());
    stack_.top() = Value(call(function.get(), arguments.get()));
  }
  Object call(PyObject* function, PyObject* arguments) {
    const bool is_default = globals_.is_default(function);
    const bool is_tuple = PyTuple_CheckExact(arguments);
    if (function == reinterpret_cast<PyObject*>(&PyODict_Type) && is_default && is_tuple &&
        PyTuple_GET_SIZE(arguments) == 0) {
      return Object::checked(PyODict_New());
    }
    const Rebuild rebuild = globals_.rebuild_of(function);
    const bool is_checked =
        rebuild != Rebuild::kNone || function == reinterpret_cast<PyObject*>(&PyByteArray_Type);
    const Object tuple = is_checked ? unpacked(arguments) : Object();
    if (!tuple) return call_by_torch(function, arguments, is_default);
    if (rebuild != Rebuild::kNone) {
      check_quantized(globals_, rebuild, tuple);
    } else {
      check_size(tuple.get());
    }
    return call_by_torch(function, tuple.get(), is_default);
  }

  Object call_by_torch(PyObject* function, PyObject* arguments, bool is_default) {
    const Rebuild rebuild = globals_.rebuild_of(function);
    const bool is_plain = rebuild != Rebuild::kNone && rebuild != Rebuild::kFromType;
    const bool is_size = function == reinterpret_cast<PyObject*>(&THPSizeType);
    if (is_default && (is_plain || is_size) && PyTuple_CheckExact(arguments)) {
      return torch_.call(function, arguments);
    }
    tuple_nesting_.check_call();
    blame_ = is_default ? Blame::kPickleUnlessRuntimeError : Blame::kNobody;
    Object result = torch_.run(std::string_view("h\0h\1R.", 6), {function, arguments});
    blame_ = Blame::kPickle;
    return result;
  }

  // Refuses a bytearray larger than the pickle: a number of a few bytes could request gigabytes.
  void check_size(PyObject* arguments) const {
    if (PyTuple_GET_SIZE(arguments) != 1 || !PyLong_Check(PyTuple_GET_ITEM(arguments, 0))) return;
    int overflow = 0;
    const long long n = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(arguments, 0), &overflow);
    if (overflow > 0 || (n > 0 && static_cast<std::size_t>(n) > cursor_.size())) {
      fail(PyExc_RuntimeError, "the pickle requests a bytearray larger than the pickle");
    }
  }
  void new_object() {
    const Object arguments = pop_object();
    const Object type = pop_object();
    tuple_nesting_.check_call();
    blame_ = globals_.is_default(type.get()) ? Blame::kPickleUnlessRuntimeError : Blame::kNobody;
    stack_.push(torch_.run(std::string_view("h\0h\1\x81.", 6), {type.get(), arguments.get()}));
    blame_ = Blame::kPickle;
  }
  void build() {
    const Object state = pop_object();
    PyObject* const object = top_object();
    if (PyODict_CheckExact(object) && PyDict_CheckExact(state.get())) {
      const Object attributes = Object::checked(PyObject_GenericGetDict(object, nullptr));
      checked(PyDict_Update(attributes.get(), state.get()));
      return;
    }
    tuple_nesting_.check_call();
    check_set_state(object);
    if (!PyODict_CheckExact(object) && !THPVariable_CheckExact(object)) blame_ = Blame::kNobody;
    torch_.run(std::string_view("h\0h\1b.", 6), {object, state.get()});
    blame_ = Blame::kPickle;
  }

  void unsupported() {
    const char op = static_cast<char>(opcode_);
    torch_.run({&op, 1});
    PyErr_Format(PyExc_RuntimeError, "ptsave does not know opcode %d", int{opcode_});
    throw PythonError{};
  }

  PickleCursor cursor_;
  CollectorPause collector_pause_;
  TorchMachine torch_;
  Globals globals_;
  StorageReferences storages_;
  TensorRebuilder rebuilder_;
  Memo memo_;
  ValueStack stack_;
  TupleNesting tuple_nesting_;
  std::size_t opcode_offset_ = 0;
  unsigned char opcode_ = 0;
  Blame blame_ = Blame::kPickle;
};

constexpr RestrictedMachine::Steps RestrictedMachine::kSteps = RestrictedMachine::steps();

}  // namespace

Object unpickle_weights_only(std::string_view pickle, PyObject* persistent_load, PyObject* encoding,
                             StorageSource* storages, PyObject* unpickler_type) {
  return RestrictedMachine(pickle, persistent_load, encoding, storages, unpickler_type).run();
}

}  // namespace ptsave
