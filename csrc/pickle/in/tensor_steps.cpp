#include "pickle/in/tensor_steps.h"

namespace ptsave {
namespace {

// Reads expected opcodes; every function returns false for any other opcode.
class Recognizer {
 public:
  Recognizer(const PickleCursor& cursor, const Memo& memo) : cursor_(cursor), memo_(memo) {}

  const PickleCursor& cursor() const { return cursor_; }

  bool opcode(unsigned char expected) {
    if (cursor_.at_end() || cursor_.peek() != expected) return false;
    cursor_.byte();
    return true;
  }

  // Reads an object from the memo.
  bool memoized(PyObject*& object) {
    std::uint64_t i = 0;
    if (opcode(opcode::kBinGet)) {
      if (!number<std::uint8_t>(i)) return false;
    } else if (!opcode(opcode::kLongBinGet) || !number<std::uint32_t>(i)) {
      return false;
    }
    const Value* const value = memo_.get(static_cast<std::uint32_t>(i));
    if (value == nullptr || value->is_storage()) return false;
    object = value->get();
    return true;
  }

  // Whether the last object is not memoized, or only in an entry that is never read.
  bool not_kept() {
    std::uint64_t i = 0;
    if (opcode(opcode::kBinPut)) {
      if (!number<std::uint8_t>(i)) return false;
    } else if (opcode(opcode::kLongBinPut)) {
      if (!number<std::uint32_t>(i)) return false;
    } else {
      return true;
    }
    return !memo_.is_read(static_cast<std::uint32_t>(i));
  }

  bool count(std::int64_t& value) {
    std::uint64_t read = 0;
    if (opcode(opcode::kBinInt1)) {
      if (!number<std::uint8_t>(read)) return false;
    } else if (opcode(opcode::kBinInt2)) {
      if (!number<std::uint16_t>(read)) return false;
    } else if (!opcode(opcode::kBinInt) || !number<std::uint32_t>(read) || read >> 31 != 0) {
      return false;
    }
    value = static_cast<std::int64_t>(read);
    return true;
  }

  bool counts(Dimensions& values) {
    if (opcode(opcode::kEmptyTuple)) return true;
    const bool marked = opcode(opcode::kMark);
    for (std::int64_t value = 0; count(value);) values.push_back(value);
    const std::size_t n = values.size();
    if (!marked && (n == 0 || n > opcode::kTuples.size())) return false;
    return opcode(marked ? opcode::kTuple : opcode::kTuples[n - 1]) && not_kept();
  }

  // Reads a storage's number, without leading zeros.
  bool key(std::string_view& text) {
    if (!short_text(text) || (text.front() == '0' && text.size() > 1)) return false;
    for (const char c : text) {
      if (c < '0' || c > '9') return false;
    }
    return not_kept();
  }

  // Reads a location: the same str for all storages ("cpu"), or a new str for each ("cuda:0").
  bool location(std::string_view& text) {
    if (cursor_.at_end() || cursor_.peek() != opcode::kBinUnicode) return memoized_text(text);
    if (!short_text(text)) return false;
    for (const char c : text) {
      if (c < ' ' || c > '~') return false;
    }
    return not_kept();
  }

  bool flag(bool& value) {
    value = opcode(opcode::kNewTrue);
    return value || opcode(opcode::kNewFalse);
  }

 private:
  bool short_text(std::string_view& text) {
    constexpr std::uint64_t kMaxNbytes = 9;
    std::uint64_t nbytes = 0;
    if (!opcode(opcode::kBinUnicode) || !number<std::uint32_t>(nbytes)) return false;
    if (nbytes == 0 || nbytes > kMaxNbytes) return false;
    text = cursor_.take(nbytes);
    return text.size() == nbytes;
  }

  bool memoized_text(std::string_view& text) {
    PyObject* object = nullptr;
    if (!memoized(object) || !PyUnicode_CheckExact(object)) return false;
    Py_ssize_t nbytes = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(object, &nbytes);
    if (data == nullptr) {  // lone surrogates
      PyErr_Clear();
      return false;
    }
    text = {data, static_cast<std::size_t>(nbytes)};
    return true;
  }

  template <class Unsigned>
  bool number(std::uint64_t& value) {
    const std::string_view bytes = cursor_.take(sizeof(Unsigned));
    if (bytes.size() < sizeof(Unsigned)) return false;
    value = little_endian(bytes);
    return true;
  }

  PickleCursor cursor_;
  const Memo& memo_;
};

bool take_persistent_id(Recognizer& next, TensorSteps& steps) {
  return next.opcode(opcode::kMark) && next.memoized(steps.word) &&
         next.memoized(steps.storage_type) && next.key(steps.key) &&
         next.location(steps.location) && next.count(steps.numel) && next.opcode(opcode::kTuple) &&
         next.not_kept() && next.opcode(opcode::kBinPersId);
}

bool take_hooks(Recognizer& next, TensorSteps& steps) {
  return next.memoized(steps.hooks_type) && next.opcode(opcode::kEmptyTuple) &&
         next.opcode(opcode::kReduce) && next.not_kept();
}

bool take_arguments(Recognizer& next, TensorSteps& steps) {
  Geometry& geometry = steps.geometry;
  return take_persistent_id(next, steps) && next.count(geometry.offset) &&
         next.counts(geometry.sizes) && next.counts(geometry.strides) &&
         next.flag(steps.requires_grad) && take_hooks(next, steps) && next.opcode(opcode::kTuple) &&
         next.not_kept() && next.opcode(opcode::kReduce);
}

}  // namespace

std::optional<TensorSteps> TensorSteps::take(PickleCursor& cursor, const Memo& memo) {
  std::optional<TensorSteps> steps(std::in_place);
  Recognizer next(cursor, memo);
  if (!take_arguments(next, *steps)) return std::nullopt;
  cursor = next.cursor();
  return steps;
}

}  // namespace ptsave
