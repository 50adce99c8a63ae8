#include "pickle/memo.h"

#include <algorithm>
#include <array>

#include "pickle/opcodes.h"

namespace ptsave {
namespace {

// What follows an opcode.  Positive numbers count bytes.
enum Operand : signed char {
  kUnknown = -1,  // not an opcode that torch's machine knows, or STOP: nothing after it is run
  kTwoLines = -2,
  kCounted1 = -3,  // bytes, after their number in one byte
  kCounted4 = -4,
};

constexpr std::array<signed char, 256> operands() {
  std::array<signed char, 256> operands{};
  operands.fill(kUnknown);
  for (const unsigned char op :
       {opcode::kMark,      opcode::kNone,    opcode::kBinPersId, opcode::kReduce,
        opcode::kAppend,    opcode::kBuild,   opcode::kEmptyDict, opcode::kAppends,
        opcode::kEmptyList, opcode::kSetItem, opcode::kTuple,     opcode::kEmptyTuple,
        opcode::kSetItems,  opcode::kNewObj,  opcode::kTuple1,    opcode::kTuple2,
        opcode::kTuple3,    opcode::kNewTrue, opcode::kNewFalse,  opcode::kEmptySet}) {
    operands[op] = 0;
  }
  for (const unsigned char op :
       {opcode::kBinInt1, opcode::kProto, opcode::kBinGet, opcode::kBinPut}) {
    operands[op] = 1;
  }
  operands[opcode::kBinInt2] = 2;
  operands[opcode::kBinInt] = operands[opcode::kLongBinGet] = operands[opcode::kLongBinPut] = 4;
  operands[opcode::kBinFloat] = 8;
  operands[opcode::kGlobal] = kTwoLines;
  operands[opcode::kShortBinString] = operands[opcode::kLong1] = kCounted1;
  operands[opcode::kBinUnicode] = kCounted4;
  return operands;
}

constexpr std::array<signed char, 256> kOperands = operands();

std::string_view take_operand(PickleCursor& cursor, signed char kind) {
  switch (kind) {
    case kTwoLines:
      cursor.line();
      return cursor.line();
    case kCounted1:
    case kCounted4:
      return cursor.take(little_endian(cursor.take(kind == kCounted1 ? 1 : 4)));
    default:
      return cursor.take(static_cast<std::size_t>(kind));
  }
}

}  // namespace

Memo::Memo(std::string_view pickle) : n_near_(pickle.size()) {
  PickleCursor cursor(pickle);
  while (!cursor.at_end()) {
    const unsigned char op = cursor.byte();
    const signed char kind = kOperands[op];
    if (kind == kUnknown) return;
    const std::string_view operand = take_operand(cursor, kind);
    if (op == opcode::kBinGet || op == opcode::kLongBinGet) {
      note_read(static_cast<std::uint32_t>(little_endian(operand)));
    }
  }
}

void Memo::note_read(std::uint32_t i) {
  if (i >= n_near_) {
    far_read_.insert(i);
    return;
  }
  if (i >= read_.size()) read_.resize(std::min(n_near_, std::size_t{i} * 2 + 64));
  read_[i] = true;
}

void Memo::put(std::uint32_t i, const Value& value) {
  if (i >= n_near_) {
    far_.insert_or_assign(i, value);
    return;
  }
  if (i >= near_.size()) near_.resize(std::size_t{i} + 1);
  near_[i] = value;
}

const Value* Memo::get_far(std::uint32_t i) const {
  const auto found = far_.find(i);
  return found == far_.end() ? nullptr : &found->second;
}

}  // namespace ptsave
