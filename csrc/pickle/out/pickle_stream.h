// The bytes of a pickle of protocol 2, and the memo of what has been written.
#pragma once

#include <Python.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "pickle/common/object.h"
#include "pickle/common/opcodes.h"
#include "pickle/out/pickle_environment.h"

namespace ptsave {

// Maps addresses to numbers by open addressing: a lookup is one cache miss.  Nothing is removed.
class AddressTable {
 public:
  AddressTable() : AddressTable(0) {}
  explicit AddressTable(std::size_t expected_size)
      : slots_(std::bit_ceil(std::max(kInitialSize, expected_size * 2))) {}

  std::optional<std::uint32_t> find(const void* address) const {
    const Slot& slot = slots_[slot_of(slots_, address)];
    return slot.address == nullptr ? std::nullopt : std::optional(slot.number);
  }

  // The number of `address`, which is not null; gives it `number` if it has none.
  std::uint32_t find_or_add(const void* address, std::uint32_t number) {
    if (size_ * 3 >= slots_.size() * 2) grow();
    Slot& slot = slots_[slot_of(slots_, address)];
    if (slot.address == nullptr) {
      slot = {address, number};
      ++size_;
    }
    return slot.number;
  }

 private:
  struct Slot {
    const void* address = nullptr;
    std::uint32_t number = 0;
  };

  static constexpr std::size_t kInitialSize = 256;  // a power of two, like all sizes

  static std::size_t slot_of(const std::vector<Slot>& slots, const void* address) {
    // Addresses are multiples of 16, many of a page's size: all bits must count.
    constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;
    const std::uint64_t hash = reinterpret_cast<std::uintptr_t>(address) * kGoldenRatio;
    const std::size_t mask = slots.size() - 1;
    std::size_t i = (hash >> 32U) & mask;
    while (slots[i].address != nullptr && slots[i].address != address) i = (i + 1) & mask;
    return i;
  }

  void grow() {
    std::vector<Slot> slots(slots_.size() * 2);
    for (const Slot& slot : slots_) {
      if (slot.address != nullptr) slots[slot_of(slots, slot.address)] = slot;
    }
    slots_.swap(slots);
  }

  std::vector<Slot> slots_;
  std::size_t size_ = 0;
};

// The objects that a pickle has already written, by identity.  Keeps them alive, so that no address
// is reused.  Needs the GIL.
class PickleMemo {
 public:
  static constexpr std::size_t kMaxSize = std::numeric_limits<std::uint32_t>::max();

  PickleMemo() = default;
  PickleMemo(const PickleMemo&) = delete;
  PickleMemo& operator=(const PickleMemo&) = delete;
  ~PickleMemo() {
    for (PyObject* object : objects_) Py_DECREF(object);
  }

  bool full() const { return size_ == kMaxSize; }

  std::optional<std::uint32_t> find(PyObject* object) const { return table_.find(object); }

  // Adds an object that is not in the memo, and returns its number.
  std::uint32_t add(PyObject* object) {
    objects_.push_back(object);
    Py_INCREF(object);
    table_.find_or_add(object, size_);
    return size_++;
  }

  // Takes a number for an object that Python's pickler would have made internally.  No other
  // reference to it can exist, so the object itself is not made.
  std::uint32_t add_unreachable() { return size_++; }

 private:
  AddressTable table_;
  std::vector<PyObject*> objects_;
  std::uint32_t size_ = 0;
};

// Writes into a growing bytes object, so that no copy is needed in the end.
//
// Not thread-safe; needs the GIL.  Throws PythonError without memory.
class PickleWriter {
 public:
  PickleWriter();

  void opcode(unsigned char op) {
    reserve(1);
    *next_++ = static_cast<char>(op);
  }
  void boolean(bool value) { opcode(value ? opcode::kNewTrue : opcode::kNewFalse); }
  void integer(std::int64_t value) {
    if (value >= 0 && value < 256) {
      with_operand(opcode::kBinInt1, static_cast<std::uint8_t>(value));
    } else {
      large_integer(value);
    }
  }
  // Writes an int outside int64, given as the fewest bytes of its two's complement, little-endian.
  void long_integer(std::string_view bytes);
  void real(double value);
  void text(std::string_view utf8) {
    with_operand(opcode::kBinUnicode, static_cast<std::uint32_t>(utf8.size()));
    append(utf8);
  }
  // Makes a tuple of the topmost n > 0 values; for n > 3, of the values above the mark.
  void tuple(std::size_t n) { opcode(n > 3 ? opcode::kTuple : opcode::kTuples[n - 1]); }
  void put(std::uint32_t number) { memo(opcode::kBinPut, opcode::kLongBinPut, number); }
  void get(std::uint32_t number) { memo(opcode::kBinGet, opcode::kLongBinGet, number); }
  void append(std::string_view bytes) {
    reserve(bytes.size());
    std::memcpy(next_, bytes.data(), bytes.size());
    next_ += bytes.size();
  }

  // Returns the bytes object; the writer must not be used afterwards.
  Object finish();

 private:
  void large_integer(std::int64_t value);

  void memo(unsigned char short_form, unsigned char long_form, std::uint32_t number) {
    if (number < 256) {
      with_operand(short_form, static_cast<std::uint8_t>(number));
    } else {
      with_operand(long_form, number);
    }
  }

  // Assumes a little-endian machine.
  template <typename Operand>
  void with_operand(unsigned char op, Operand operand) {
    reserve(1 + sizeof operand);
    *next_++ = static_cast<char>(op);
    std::memcpy(next_, &operand, sizeof operand);
    next_ += sizeof operand;
  }

  void reserve(std::size_t n) {
    if (std::cmp_less(end_ - next_, n)) grow(n);
  }
  void grow(std::size_t n);
  void resize(std::size_t nbytes);

  Object bytes_;
  char* next_ = nullptr;
  char* end_ = nullptr;
};

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

// The pickle being written: opcodes, memo, globals and reduced objects, for objects of any kind.
// Lives for one save.  Not thread-safe; needs the GIL.
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
