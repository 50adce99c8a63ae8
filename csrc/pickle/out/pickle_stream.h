// The pickle being written: opcodes, memo, globals and reduced objects, for objects of any kind.
//
// Lives for one save.  Not thread-safe; needs the GIL.
#pragma once

#include <Python.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "pickle/common/object.h"
#include "pickle/out/pickle_environment.h"
#include "pickle/out/pickle_memo.h"
#include "pickle/out/pickle_writer.h"

namespace ptsave {

// Thrown if only Python's pickler can write the object or raise the right error.
struct HandOver {};

// An object that one pickle refers to many times, with its number, which saves the memo's lookup.
struct Recurring {
  Object object;
  std::optional<std::uint32_t> number = std::nullopt;
};

// Whether the pickle can meet an object again.  If an object has only one reference, kOnce, it is
// neither looked up in the memo nor put there: it only takes a number.
enum class Reach : std::uint8_t { kOnce, kAgain };

class PickleStream {
 public:
  explicit PickleStream(const PickleEnvironment& environment) : environment_(environment) {}

  PickleWriter& out() { return out_; }

  std::optional<std::uint32_t> find(PyObject* object) const { return memo_.find(object); }
  // Refers to the object if it has been written; otherwise returns false.
  bool get(PyObject* object);
  // Memoizes the object that has just been written.
  void put(PyObject* object, Reach reach = Reach::kAgain) {
    if (reach == Reach::kOnce) {
      put_unreachable();
    } else {
      out_.put(checked_memo().add(object));
    }
  }
  // Takes a number for a just written object that is made only for this pickle; returns the number.
  std::uint32_t put_unreachable() {
    const std::uint32_t number = checked_memo().add_unreachable();
    out_.put(number);
    return number;
  }

  // Writes a str that has not been written yet.
  void text(PyObject* text, Reach reach) {
    characters(text);
    put(text, reach);
  }
  // Writes a str's characters without memoizing it.
  void characters(PyObject* text);
  void text(Recurring& text);

  // Writes a class or a function by its name; it has not been written yet.
  void global(PyObject* object);
  void global(Recurring& object);
  // Writes an object of torch whose __reduce__ returns just a name.
  void reduced_to_name(PyObject* object);
  void reduced_to_name(Recurring& object);

  // Writes an empty OrderedDict without memoizing it.
  void new_ordered_dict() {
    global(ordered_dict_class_);
    out_.opcode(opcode::kEmptyTuple);
    out_.opcode(opcode::kReduce);
  }

  Object finish() {
    out_.opcode(opcode::kStop);
    return out_.finish();
  }

 private:
  PickleMemo& checked_memo() {
    if (memo_.full()) throw HandOver{};
    return memo_;
  }

  // Refers to a recurring object, or else calls `write`, which writes and memoizes it.
  template <typename Write>
  void recurring(Recurring& recurring, const Write& write) {
    if (recurring.number) return out_.get(*recurring.number);
    if (PyObject* const object = recurring.object.get(); !get(object)) write(object);
    recurring.number = memo_.find(recurring.object.get());
  }

  void global(PyObject* object, const Object& name);
  std::pair<Object, Object> names_in_python_2(Object module, Object name) const;

  const PickleEnvironment& environment_;
  PickleMemo memo_;
  PickleWriter out_;
  Recurring ordered_dict_class_{
      Object::borrow(reinterpret_cast<PyObject*>(environment_.ordered_dict_type()))};
};

}  // namespace ptsave
