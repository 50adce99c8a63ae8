// The bytes of a pickle of protocol 2, opcode by opcode, as Python's pickler encodes them.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

#include "pickle/common/object.h"
#include "pickle/common/opcodes.h"

namespace ptsave {

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

}  // namespace ptsave
