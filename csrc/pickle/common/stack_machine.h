// The steps of torch.save's pickles: the machine that scan and outline share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "pickle/common/opcodes.h"

namespace ptsave {

// Thrown if a pickle takes a step that the machine does not know, or is malformed.
struct Declined {};

// Takes the steps of Python's and torch's unpicklers: operands, stack, marks and memo.  `Derived`
// has a function for each kind of step, which applies the step to its values.  Its function keep(i)
// tells whether the memo keeps entry `i`, and other_step() takes or declines all other steps.  The
// first Value::kind means "no value".
template <class Derived, class Value>
class StackMachine {
 private:
  friend Derived;

  explicit StackMachine(std::string_view pickle) : cursor_(pickle) {}

  Derived& self() { return static_cast<Derived&>(*this); }

  // ---- operands

  std::string_view exactly(std::size_t n) {
    const std::string_view bytes = cursor_.take(n);
    if (bytes.size() < n) throw Declined{};
    return bytes;
  }
  unsigned char byte() { return static_cast<unsigned char>(exactly(1).front()); }
  std::uint32_t number() { return static_cast<std::uint32_t>(little_endian(exactly(4))); }

  // ---- the stack; no step reaches below the topmost mark

  void push(Value value) { stack_.push_back(std::move(value)); }
  std::size_t depth() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  Value& top(std::size_t n = 1) {
    if (depth() < n) throw Declined{};
    return stack_[stack_.size() - n];
  }
  Value pop() {
    Value value = std::move(top());
    stack_.pop_back();
    return value;
  }
  // Removes the topmost mark, and returns the number of values above it.
  std::size_t pop_mark() {
    if (marks_.empty()) throw Declined{};
    const std::size_t n = depth();
    marks_.pop_back();
    return n;
  }
  // The topmost `n` values, which exist.
  std::span<Value> last(std::size_t n) { return std::span(stack_).last(n); }
  void drop(std::size_t n) { stack_.resize(stack_.size() - n); }

  // ---- the memo

  void put(std::uint32_t i) {
    const Value& value = top();
    if (!self().keep(i)) return;
    if (i >= memo_.size()) memo_.resize(std::size_t{i} + 1);
    memo_[i] = value;
  }
  void get(std::uint32_t i) {
    if (i >= memo_.size() || memo_[i].kind == decltype(Value::kind){}) throw Declined{};
    push(memo_[i]);
  }

  // ---- the steps

  // Takes any step except STOP.
  void step(unsigned char code) {
    switch (code) {
      case opcode::kProto:
        return self().protocol(byte());
      case opcode::kMark:
        return marks_.push_back(stack_.size());
      case opcode::kNone:
      case opcode::kNewTrue:
      case opcode::kNewFalse:
        return self().constant(code, {});
      case opcode::kBinInt1:
        return self().constant(code, exactly(1));
      case opcode::kBinInt2:
        return self().constant(code, exactly(2));
      case opcode::kBinInt:
        return self().constant(code, exactly(4));
      case opcode::kBinFloat:
        return self().constant(code, exactly(8));
      case opcode::kLong1:
      case opcode::kShortBinString:
        return self().constant(code, exactly(byte()));
      case opcode::kBinUnicode:
        return self().constant(code, exactly(number()));
      case opcode::kBinPut:
        return put(byte());
      case opcode::kLongBinPut:
        return put(number());
      case opcode::kBinGet:
        return get(byte());
      case opcode::kLongBinGet:
        return get(number());
      case opcode::kGlobal:
        return global();
      case opcode::kBinPersId:
        return self().persistent_id();
      case opcode::kReduce:
        return self().reduce();
      case opcode::kBuild:
        return self().build();
      default:
        return step_of_containers(code);
    }
  }

  void step_of_containers(unsigned char code) {
    switch (code) {
      case opcode::kEmptyTuple:
        return self().make_tuple(0);
      case opcode::kTuple1:
        return tuple(1);
      case opcode::kTuple2:
        return tuple(2);
      case opcode::kTuple3:
        return tuple(3);
      case opcode::kTuple:
        return self().make_tuple(pop_mark());
      case opcode::kEmptyList:
        return self().new_list();
      case opcode::kEmptyDict:
        return self().new_dict();
      case opcode::kAppend:
        return append(1);
      case opcode::kAppends:
        return append(pop_mark());
      case opcode::kSetItem:
        return set_items(2);
      case opcode::kSetItems:
        return set_items(pop_mark());
      default:
        return self().other_step(code);
    }
  }

  // Passes on `module` and `name`, which are neighbours in the pickle, with a newline between.
  void global() {
    std::string_view module = cursor_.line();
    std::string_view name = cursor_.line();
    if (!name.ends_with('\n')) throw Declined{};
    module.remove_suffix(1);
    name.remove_suffix(1);
    self().global(module, name);
  }
  void tuple(std::size_t n) {
    top(n);
    self().make_tuple(n);
  }
  // Passes on the container and the topmost `n` values.
  void append(std::size_t n) {
    self().append(top(n + 1), last(n));
    drop(n);
  }
  void set_items(std::size_t n) {
    if (n % 2 != 0) throw Declined{};
    self().set_items(top(n + 1), last(n));
    drop(n);
  }

  PickleCursor cursor_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;  // sizes of the stack
  std::vector<Value> memo_;
};

}  // namespace ptsave
