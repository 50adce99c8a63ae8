#include "pickle/in/unpickler.h"

#include <bit>
#include <string>
#include <utility>

#include "pickle/common/attribute.h"
#include "pickle/in/restricted_machine.h"

namespace ptsave {
namespace {

// After these bytes of the pickle (milliseconds), signals are handled and other threads may run.
constexpr std::size_t kBytesInARow = std::size_t{128} << 10;

// Does nothing for an exception that takes no attributes.
void set_offset(PyObject* exception, PyObject* offset) {
  if (offset == nullptr || PyObject_SetAttrString(exception, "pickle_offset", offset) < 0) {
    PyErr_Clear();
  }
}

}  // namespace

// ------------------------------------------------------------------------------------- running

Object RestrictedMachine::run() {
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
      if (opcode_ == opcode::kStop) return stop();
      (this->*kSteps[opcode_])();
    }
  } catch (const PythonError&) {
    note_offset();
    throw;
  }
}

void RestrictedMachine::note_offset() const {
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

void RestrictedMachine::let_others_run() {
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

PyObject* RestrictedMachine::top_object() {
  Value& value = stack_.top();
  make_objects({&value, 1});
  return value.get();
}

Object RestrictedMachine::pop_object() {
  Value value = stack_.pop();
  make_objects({&value, 1});
  return std::move(value).object();
}

void RestrictedMachine::make_objects(std::span<Value> values) {
  for (Value& value : values) {
    if (!value.is_storage()) continue;
    blame_ = Blame::kNobody;
    value = Value(storages_.as_object(value.storage_index()));
    blame_ = Blame::kPickle;
  }
}

// ------------------------------------------------------------------------------------- operands

std::string_view RestrictedMachine::exactly(std::size_t n) {
  const std::string_view bytes = cursor_.take(n);
  if (bytes.size() < n) {
    const Object module = import_module("struct");
    PyErr_Format(attribute(module, "error").get(), "unpack requires a buffer of %zu bytes", n);
    throw PythonError{};
  }
  return bytes;
}

unsigned char RestrictedMachine::operand_byte() {
  if (cursor_.at_end()) fail(PyExc_IndexError, "index out of range");
  return cursor_.byte();
}

// ------------------------------------------------------------------------------------- constants

template <class Number>
void RestrictedMachine::integer() {
  Number number = 0;
  if constexpr (sizeof(Number) == 1) {
    number = operand_byte();
  } else {
    number = static_cast<Number>(little_endian(exactly(sizeof(Number))));
  }
  stack_.push(Object::checked(PyLong_FromLong(number)));
}

void RestrictedMachine::real() {
  std::uint64_t bits = 0;
  for (const char byte : exactly(sizeof(double)))
    bits = bits << 8 | static_cast<unsigned char>(byte);
  stack_.push(Object::checked(PyFloat_FromDouble(std::bit_cast<double>(bits))));
}

void RestrictedMachine::long_integer() {
  const std::string_view bytes = cursor_.take(operand_byte());
  if (bytes.size() <= sizeof(std::int64_t)) {
    const std::size_t n_unused = 8 * (sizeof(std::int64_t) - bytes.size());
    const std::uint64_t shifted = n_unused == 64 ? 0 : little_endian(bytes) << n_unused;
    const std::int64_t number = n_unused == 64 ? 0 : static_cast<std::int64_t>(shifted) >> n_unused;
    stack_.push(Object::checked(PyLong_FromLongLong(number)));
  } else {
    stack_.push(run_counted(bytes));
  }
}

void RestrictedMachine::text() {
  const std::string_view bytes = cursor_.take(operand_32());
  stack_.push(Object::checked(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogatepass")));
}

void RestrictedMachine::short_string() { stack_.push(run_counted(cursor_.take(operand_byte()))); }

// Runs the current opcode, with an operand of at most 255 counted bytes, on torch's machine.
Object RestrictedMachine::run_counted(std::string_view bytes) const {
  std::string program{static_cast<char>(opcode_), static_cast<char>(bytes.size())};
  return torch_.run(program.append(bytes).append("."));
}

// -------------------------------------------------------------------------------- stack and memo

void RestrictedMachine::protocol() {
  const unsigned char version = operand_byte();
  if (version == 2) return;
  const char program[] = {static_cast<char>(opcode::kProto), static_cast<char>(version), 'N', '.'};
  blame_ = Blame::kNobody;
  torch_.run({program, std::size(program)});  // warns
  blame_ = Blame::kPickle;
}

void RestrictedMachine::put(std::uint32_t i) {
  const Value& value = stack_.top();
  if (memo_.is_read(i)) memo_.put(i, value);
}

void RestrictedMachine::get(std::uint32_t i) {
  const Value* const value = memo_.get(i);
  if (value == nullptr) {
    const Object key = Object::checked(PyLong_FromUnsignedLong(i));
    PyErr_SetObject(PyExc_KeyError, key.get());
    throw PythonError{};
  }
  stack_.push(*value);
}

// ------------------------------------------------------------------------------------ containers

template <std::size_t N>
void RestrictedMachine::tuple_of() {
  stack_.require(N);
  make_tuple(N);
}

void RestrictedMachine::make_tuple(std::size_t n) {
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

void RestrictedMachine::append() {
  const Object item = pop_object();
  PyObject* const list = top_object();
  if (PyList_CheckExact(list)) {
    checked(PyList_Append(list, item.get()));
  } else {
    torch_.run(std::string_view("h\0h\1a.", 6), {list, item.get()});
  }
}

void RestrictedMachine::appends() {
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

// Stores items in a dict; false if `target` is of a type for which torch must do it.
bool RestrictedMachine::store_items(PyObject* target, std::size_t n) {
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

void RestrictedMachine::set_item() {
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

void RestrictedMachine::set_items() {
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

constexpr RestrictedMachine::Steps RestrictedMachine::steps() {
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

constexpr RestrictedMachine::Steps RestrictedMachine::kSteps = RestrictedMachine::steps();

Object unpickle_weights_only(std::string_view pickle, PyObject* persistent_load, PyObject* encoding,
                             StorageSource* storages, PyObject* unpickler_type) {
  return RestrictedMachine(pickle, persistent_load, encoding, storages, unpickler_type).run();
}

}  // namespace ptsave
