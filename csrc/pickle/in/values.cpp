#include "pickle/in/values.h"

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

namespace {

// A thread's C stack of 8 MiB overflows at 60,000 to 100,000 levels.
constexpr std::uint32_t kMaxTupleDepth = 10'000;
constexpr std::uint32_t kMaxTuples = 10'000'000;  // a second; a few shared tuples can make 2^100

}  // namespace

bool TupleNesting::Nesting::is_dangerous() const {
  return depth > kMaxTupleDepth || n_tuples > kMaxTuples;
}

TupleNesting::Nesting TupleNesting::nesting_of(PyObject* tuple) const {
  const auto found = nestings_.find(tuple);
  return found == nestings_.end() ? Nesting{} : found->second;
}

void TupleNesting::note(PyObject* tuple) {
  Nesting nesting;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* const part = PyTuple_GET_ITEM(tuple, i);
    if (!PyTuple_CheckExact(part)) continue;
    const Nesting inner = nesting_of(part);
    nesting.depth = std::max(nesting.depth, inner.depth + 1);
    nesting.n_tuples = std::min(nesting.n_tuples + inner.n_tuples, kMaxTuples + 1);
  }
  if (nesting.depth > 1) {
    nestings_.insert_or_assign(tuple, nesting);
    any_is_dangerous_ |= nesting.is_dangerous();
  } else if (!nestings_.empty()) {
    nestings_.erase(tuple);  // an earlier tuple at this address
  }
}

void TupleNesting::check_key(PyObject* key) const {
  if (any_is_dangerous_ && PyTuple_CheckExact(key) && nesting_of(key).is_dangerous()) {
    fail(PyExc_RecursionError, "a key is a tuple of too many levels");
  }
}

void TupleNesting::check_call() const {
  if (any_is_dangerous_) {
    fail(PyExc_RecursionError, "there are tuples of too many levels for a call that may hash them");
  }
}

}  // namespace ptsave
