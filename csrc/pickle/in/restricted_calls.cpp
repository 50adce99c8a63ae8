// The restricted machine's steps that run code. torch.save writes the fast ones for plain tensors.
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <utility>

#include "pickle/in/restricted_machine.h"

namespace ptsave {

// At the MARK of a tensor's arguments, tries all of its steps at once: torch.save writes the same
// steps for every plain tensor.
void RestrictedMachine::mark() {
  const bool is_tensor = stack_.depth() > 0 && stack_.last(1).front().get() == globals_.tensor_v2();
  if (!is_tensor || !rebuild_at_once()) stack_.mark();
}

// Takes all steps up to the REDUCE that makes the tensor, if they are the usual ones.  Otherwise it
// only may have registered the storage.
bool RestrictedMachine::rebuild_at_once() {
  if (!globals_.rebuilds_are_torchs()) return false;
  PickleCursor ahead = cursor_;
  const std::optional<TensorSteps> steps = TensorSteps::take(ahead, memo_);
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

bool RestrictedMachine::rebuild_over(const c10::Storage& storage, c10::ScalarType dtype,
                                     const TensorSteps& steps, const PickleCursor& ahead) {
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

// Tries to avoid making a tuple of the last n values: if only the next opcode can use it, executes
// that opcode with the values on the stack.
bool RestrictedMachine::consume_tuple(std::size_t n) {
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

bool RestrictedMachine::refer_to_storage(std::span<const Value> id) {
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

void RestrictedMachine::persistent_id() {
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

void RestrictedMachine::global() {
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

void RestrictedMachine::reduce() {
  const Object arguments = pop_object();
  const Object function = Object::borrow(top_object());
  stack_.top() = Value(call(function.get(), arguments.get()));
}

Object RestrictedMachine::call(PyObject* function, PyObject* arguments) {
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

Object RestrictedMachine::call_by_torch(PyObject* function, PyObject* arguments, bool is_default) {
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

// Refuses a bytearray larger than the pickle, which a few bytes (a number) could request.
void RestrictedMachine::check_size(PyObject* arguments) const {
  if (PyTuple_GET_SIZE(arguments) != 1 || !PyLong_Check(PyTuple_GET_ITEM(arguments, 0))) return;
  int overflow = 0;
  const long long n = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(arguments, 0), &overflow);
  if (overflow > 0 || (n > 0 && static_cast<std::size_t>(n) > cursor_.size())) {
    fail(PyExc_RuntimeError, "a bytearray larger than the pickle it comes from");
  }
}

void RestrictedMachine::new_object() {
  const Object arguments = pop_object();
  const Object type = pop_object();
  tuple_nesting_.check_call();
  blame_ = globals_.is_default(type.get()) ? Blame::kPickleUnlessRuntimeError : Blame::kNobody;
  stack_.push(torch_.run(std::string_view("h\0h\1\x81.", 6), {type.get(), arguments.get()}));
  blame_ = Blame::kPickle;
}

void RestrictedMachine::build() {
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

void RestrictedMachine::unsupported() {
  const char op = static_cast<char>(opcode_);
  torch_.run({&op, 1});
  PyErr_Format(PyExc_RuntimeError, "ptsave does not know opcode %d", int{opcode_});
  throw PythonError{};
}

}  // namespace ptsave
