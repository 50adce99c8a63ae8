// The machine behind unpickle_weights_only().
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "pickle/common/object.h"
#include "pickle/common/opcodes.h"
#include "pickle/in/memo.h"
#include "pickle/in/storage_references.h"
#include "pickle/in/tensor_rebuild.h"
#include "pickle/in/tensor_steps.h"
#include "pickle/in/torch_machine.h"
#include "pickle/in/tuple_nesting.h"
#include "pickle/in/unpickler.h"
#include "pickle/in/value_stack.h"

namespace ptsave {

// Takes the fast steps itself and leaves all others to torch's machine.  One per load.  Needs the
// GIL.
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

  Object run();

 private:
  using Step = void (RestrictedMachine::*)();
  using Steps = std::array<Step, 256>;

  static constexpr Steps steps();
  static const Steps kSteps;

  // The cause of an exception; if it is the pickle, the exception gets the offset in the pickle.
  enum class Blame : std::uint8_t { kPickle, kPickleUnlessRuntimeError, kNobody };

  void note_offset() const;
  void let_others_run();

  // ---- the stack; a value must be an object before it is passed to Python

  void push_borrowed(PyObject* object) { stack_.push(Object::borrow(object)); }
  Object pop_object();
  PyObject* top_object();
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

  void empty_tuple() { stack_.push(Object::checked(PyTuple_New(0))); }
  void empty_list() { stack_.push(Object::checked(PyList_New(0))); }
  void empty_dict() { stack_.push(Object::checked(PyDict_New())); }
  void empty_set() { stack_.push(Object::checked(PySet_New(nullptr))); }
  template <std::size_t N>
  void tuple_of();
  void marked_tuple() { make_tuple(stack_.pop_mark()); }
  void make_tuple(std::size_t n);
  void append();
  void appends();
  void set_item();
  void set_items();
  bool store_items(PyObject* target, std::size_t n);

  // ---- everything that runs code

  bool rebuild_at_once();
  // Pushes the tensor of `steps`, which end at `ahead`; false if torch must make it.
  bool rebuild_over(const c10::Storage& storage, c10::ScalarType dtype, const TensorSteps& steps,
                    const PickleCursor& ahead);
  bool consume_tuple(std::size_t n);
  bool refer_to_storage(std::span<const Value> id);
  void global();
  void persistent_id();
  void reduce();
  Object call(PyObject* function, PyObject* arguments);
  Object call_by_torch(PyObject* function, PyObject* arguments, bool is_default);
  void check_size(PyObject* arguments) const;
  void new_object();
  void build();
  void unsupported();

  Object stop() { return pop_object(); }

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

}  // namespace ptsave
