#include "pickle/in/memo.h"

#include <algorithm>

#include "pickle/common/opcodes.h"

namespace ptsave {
namespace {

// Skips an opcode's operand.  False for STOP and for an opcode that torch's machine does not know,
// because nothing after it is run.
//
// Each case has its own constant, so that the processor can predict the place of the next opcode.
// With a table, the place would be known only after two loads.
bool skip_operand(PickleCursor& cursor, unsigned char op) {
  switch (op) {
    case opcode::kMark:
    case opcode::kNone:
    case opcode::kBinPersId:
    case opcode::kReduce:
    case opcode::kAppend:
    case opcode::kBuild:
    case opcode::kEmptyDict:
    case opcode::kAppends:
    case opcode::kEmptyList:
    case opcode::kSetItem:
    case opcode::kTuple:
    case opcode::kEmptyTuple:
    case opcode::kSetItems:
    case opcode::kNewObj:
    case opcode::kTuple1:
    case opcode::kTuple2:
    case opcode::kTuple3:
    case opcode::kNewTrue:
    case opcode::kNewFalse:
    case opcode::kEmptySet:
      return true;
    case opcode::kBinInt1:
    case opcode::kProto:
    case opcode::kBinPut:
      cursor.skip(1);
      return true;
    case opcode::kBinInt2:
      cursor.skip(2);
      return true;
    case opcode::kBinInt:
    case opcode::kLongBinPut:
      cursor.skip(4);
      return true;
    case opcode::kBinFloat:
      cursor.skip(8);
      return true;
    case opcode::kGlobal:
      cursor.line();
      cursor.line();
      return true;
    case opcode::kShortBinString:
    case opcode::kLong1:
      cursor.skip(little_endian(cursor.take(1)));
      return true;
    case opcode::kBinUnicode:
      cursor.skip(little_endian(cursor.take(4)));
      return true;
    default:
      return false;
  }
}

}  // namespace

Memo::Memo(std::string_view pickle) : n_near_(pickle.size()) {
  PickleCursor cursor(pickle);
  while (!cursor.at_end()) {
    const unsigned char op = cursor.byte();
    if (op == opcode::kBinGet || op == opcode::kLongBinGet) {
      const std::size_t nbytes = op == opcode::kBinGet ? 1 : 4;
      note_read(static_cast<std::uint32_t>(little_endian(cursor.take(nbytes))));
    } else if (!skip_operand(cursor, op)) {
      return;
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
