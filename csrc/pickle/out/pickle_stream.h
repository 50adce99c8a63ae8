// The bytes of a pickle of protocol 2, and the memo of the objects in it.
#pragma once

#include <Python.h>

#include <algorithm>
#include <array>
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
    // Addresses are multiples of 16, and many of a page's size, so the hash must use all bits.
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
  PickleWriter()
      : bytes_(Object::checked(PyBytes_FromStringAndSize(nullptr, kInitialNbytes))),
        next_(PyBytes_AS_STRING(bytes_.get())),
        end_(next_ + kInitialNbytes) {}

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
  void long_integer(std::string_view bytes) {
    if (bytes.size() < 256) {
      with_operand(opcode::kLong1, static_cast<std::uint8_t>(bytes.size()));
    } else {
      with_operand(opcode::kLong4, static_cast<std::uint32_t>(bytes.size()));
    }
    append(bytes);
  }
  void real(double value) {
    auto bytes = std::bit_cast<std::array<char, sizeof value>>(value);
    std::ranges::reverse(bytes);
    opcode(opcode::kBinFloat);
    append({bytes.data(), bytes.size()});
  }
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
  Object finish() {
    resize(static_cast<std::size_t>(next_ - PyBytes_AS_STRING(bytes_.get())));
    return std::move(bytes_);
  }

 private:
  static_assert(std::endian::native == std::endian::little);
  static constexpr Py_ssize_t kInitialNbytes = 1024;

  void large_integer(std::int64_t value) {
    if (value >= 0 && value < 0x10000) {
      with_operand(opcode::kBinInt2, static_cast<std::uint16_t>(value));
    } else if (value >= std::numeric_limits<std::int32_t>::min() &&
               value <= std::numeric_limits<std::int32_t>::max()) {
      with_operand(opcode::kBinInt, static_cast<std::int32_t>(value));
    } else {
      // Leave out bytes that only repeat the sign.
      std::size_t n = sizeof value;
      const auto upper_bits = [&](std::size_t n_bits) { return value >> n_bits; };
      while (upper_bits(8 * (n - 1) - 1) == 0 || upper_bits(8 * (n - 1) - 1) == -1) --n;
      std::array<char, sizeof value> bytes{};
      std::memcpy(bytes.data(), &value, sizeof value);
      long_integer({bytes.data(), n});
    }
  }

  void memo(unsigned char short_form, unsigned char long_form, std::uint32_t number) {
    if (number < 256) {
      with_operand(short_form, static_cast<std::uint8_t>(number));
    } else {
      with_operand(long_form, number);
    }
  }

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
  void grow(std::size_t n) {
    const auto capacity = static_cast<std::size_t>(end_ - PyBytes_AS_STRING(bytes_.get()));
    resize(2 * capacity + n);
  }
  void resize(std::size_t nbytes) {
    const std::ptrdiff_t used = next_ - PyBytes_AS_STRING(bytes_.get());
    PyObject* bytes = bytes_.release();
    checked(_PyBytes_Resize(&bytes, static_cast<Py_ssize_t>(nbytes)));
    bytes_ = Object::steal(bytes);
    next_ = PyBytes_AS_STRING(bytes) + used;
    end_ = PyBytes_AS_STRING(bytes) + nbytes;
  }

  Object bytes_;
  char* next_ = nullptr;
  char* end_ = nullptr;
};

// An object that one pickle refers to many times, and its memo number, which saves a lookup.
struct Recurring {
  Object object;
  std::optional<std::uint32_t> number = std::nullopt;
};

// Whether the pickle can meet an object again.  If an object has only one reference, kOnce, it is
// neither looked up in the memo nor put there: it only takes a number.
enum class Reach : std::uint8_t { kOnce, kAgain };

// A str attribute of a class, function or torch object.
inline Object text_attribute(PyObject* object, const char* name) {
  Object text = attribute_or_nothing(object, name);
  if (!text || PyUnicode_CheckExact(text.get()) == 0) throw HandOver{};
  return text;
}

inline std::string_view ascii(PyObject* text) {
  if (PyUnicode_CheckExact(text) == 0 || PyUnicode_IS_COMPACT_ASCII(text) == 0) throw HandOver{};
  return {static_cast<const char*>(PyUnicode_DATA(text)),
          static_cast<std::size_t>(PyUnicode_GET_LENGTH(text))};
}

// Whether the object is the module's attribute of that name.
inline bool is_found(PyObject* object, PyObject* module_name, PyObject* name) {
  const Object module = Object::steal(PyImport_GetModule(module_name));
  if (!module || PyModule_CheckExact(module.get()) == 0) {
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    return false;
  }
  return item_or_null(PyModule_GetDict(module.get()), name) == object;
}

// The pickle being written: opcodes, memo, globals and reduced objects, for objects of any kind.
// Lives for one save.  Not thread-safe; needs the GIL.
class PickleStream {
 public:
  explicit PickleStream(const PickleEnvironment& environment) : environment_(environment) {}

  PickleWriter& out() { return out_; }

  std::optional<std::uint32_t> find(PyObject* object) const { return memo_.find(object); }
  // Refers to the object if it has been written; otherwise returns false.
  bool get(PyObject* object) {
    const std::optional<std::uint32_t> number = memo_.find(object);
    if (number) out_.get(*number);
    return number.has_value();
  }
  // Memoizes the object that has just been written.
  void put(PyObject* object, Reach reach = Reach::kAgain) {
    if (reach == Reach::kOnce) {
      put_unreachable();
    } else {
      out_.put(checked_memo().add(object));
    }
  }
  // Takes and returns a number for the object just written, which is made only for this pickle.
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
  void characters(PyObject* text) {
    if (PyUnicode_IS_COMPACT_ASCII(text) != 0) {
      const auto size = static_cast<std::size_t>(PyUnicode_GET_LENGTH(text));
      if (size > std::numeric_limits<std::uint32_t>::max()) throw HandOver{};
      return out_.text({static_cast<const char*>(PyUnicode_DATA(text)), size});
    }
    const Object utf8 = Object::checked(PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass"));
    const auto size = static_cast<std::size_t>(PyBytes_GET_SIZE(utf8.get()));
    if (size > std::numeric_limits<std::uint32_t>::max()) throw HandOver{};
    out_.text({PyBytes_AS_STRING(utf8.get()), size});
  }

  void text(Recurring& text) {
    recurring(text, [this](PyObject* object) { this->text(object, Reach::kAgain); });
  }

  // Writes a class or a function by its name; it has not been written yet.
  void global(PyObject* object) { global(object, text_attribute(object, "__qualname__")); }
  void global(Recurring& object) {
    recurring(object, [this](PyObject* found) { global(found); });
  }
  // Writes an object of torch whose __reduce__ returns just a name.
  void reduced_to_name(PyObject* object) {
    const Object name = call_method(object, "__reduce__");
    global(object, name);
  }
  void reduced_to_name(Recurring& object) {
    recurring(object, [this](PyObject* found) { reduced_to_name(found); });
  }

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

  void global(PyObject* object, const Object& global_name) {
    const Object module_name = text_attribute(object, "__module__");
    if (ascii(global_name.get()).find('.') != std::string_view::npos) throw HandOver{};
    if (!is_found(object, module_name.get(), global_name.get())) throw HandOver{};
    const auto [module_in_python_2, name_in_python_2] = names_in_python_2(module_name, global_name);
    out_.opcode(opcode::kGlobal);
    out_.append(ascii(module_in_python_2.get()));
    out_.append("\n");
    out_.append(ascii(name_in_python_2.get()));
    out_.append("\n");
    put(object);
  }

  std::pair<Object, Object> names_in_python_2(Object module, Object name) const {
    const Object key = Object::checked(PyTuple_Pack(2, module.get(), name.get()));
    PyObject* const both = item_or_null(environment_.global_names.get(), key.get());
    if (both != nullptr) {
      if (PyTuple_CheckExact(both) == 0 || PyTuple_GET_SIZE(both) != 2) throw HandOver{};
      return {Object::borrow(PyTuple_GET_ITEM(both, 0)), Object::borrow(PyTuple_GET_ITEM(both, 1))};
    }
    PyObject* const renamed = item_or_null(environment_.module_names.get(), module.get());
    return {renamed == nullptr ? std::move(module) : Object::borrow(renamed), std::move(name)};
  }

  const PickleEnvironment& environment_;
  PickleMemo memo_;
  PickleWriter out_;
  Recurring ordered_dict_class_{
      Object::borrow(reinterpret_cast<PyObject*>(environment_.ordered_dict_type()))};
};

}  // namespace ptsave
