// The pickle being written: opcodes, memo, globals and reduced objects, the same for objects of any
// kind.
//
// Lives as long as one save.  Not thread-safe; needs the GIL.
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

// Thrown where only Python's pickler can write the object, or raise the right error.
struct HandOver {};

// An object that one pickle refers to again and again: once it is written, its number is known
// without a look into the memo.
struct Recurring {
  Object object;
  std::optional<std::uint32_t> number = std::nullopt;
};

// Whether the pickle can meet an object once more.  If the only reference to it is the one that it
// was met through, it cannot, and need not be looked for in the memo, nor be put there: only its
// number is taken.
enum class Reach : std::uint8_t { kOnce, kAgain };

class PickleStream {
 public:
  explicit PickleStream(const PickleEnvironment& environment) : environment_(environment) {}

  PickleWriter& out() { return out_; }

  std::optional<std::uint32_t> find(PyObject* object) const { return memo_.find(object); }
  // If the object has been written, refers to it; otherwise returns false.
  bool get(PyObject* object);
  // The object has just been written.
  void put(PyObject* object, Reach reach = Reach::kAgain) {
    if (reach == Reach::kOnce) {
      put_unreachable();
    } else {
      out_.put(checked_memo().add(object));
    }
  }
  // One that is made for this pickle only has just been written; returns its number.
  std::uint32_t put_unreachable() {
    const std::uint32_t number = checked_memo().add_unreachable();
    out_.put(number);
    return number;
  }

  // A str that has not been written yet.
  void text(PyObject* text, Reach reach) {
    characters(text);
    put(text, reach);
  }
  // Its characters, as a str that is not in the memo.
  void characters(PyObject* text);
  void text(Recurring& text);

  // A class or a function that has not been written yet, by its name.
  void global(PyObject* object);
  void global(Recurring& object);
  // An object of torch's that __reduce__ gives a name to, and nothing else.
  void reduced_to_name(PyObject* object);
  void reduced_to_name(Recurring& object);

  // An empty OrderedDict, which is not in the memo yet.
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

  // `write` writes an object that is not in the memo, and puts it there.
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
