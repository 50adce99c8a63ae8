// An abstract machine: it takes the steps of Python's and torch's unpicklers on kinds of values
// (plain, storage, tensor, container, ...) instead of values, and refuses all other steps.
#include "pickle/scan/scan.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pickle/common/opcodes.h"

namespace ptsave {
namespace {

// A cursor that records when it has run past the pickle's end; its results are then meaningless.
class Cursor {
 public:
  explicit Cursor(std::string_view pickle) : cursor_(pickle) {}

  bool failed() const { return failed_; }

  unsigned char byte() { return static_cast<unsigned char>(little_endian(take(1))); }
  std::uint32_t little_endian_32() { return static_cast<std::uint32_t>(little_endian(take(4))); }

  std::string_view take(std::size_t n) {
    const std::string_view taken = cursor_.take(n);
    failed_ |= taken.size() < n;
    return taken;
  }

  // Takes a line without its newline.
  std::string_view line() {
    std::string_view taken = cursor_.line();
    if (!taken.ends_with('\n')) {
      failed_ = true;
      return {};
    }
    taken.remove_suffix(1);
    return taken;
  }

 private:
  PickleCursor cursor_;
  bool failed_ = false;
};

// ------------------------------------------------------------------------------------------ values

enum class Kind : std::uint8_t {
  kNothing,      // a memo entry that was never written
  kPlain,        // None, bool, number, text, bytes, dtype, device, torch.Size, tuple of these
  kEmptyTuple,   // also plain
  kTuple,        // any other tuple; index: into Machine::tuples_
  kList,         // index: into Machine::containers_, as for the next two
  kDict,         //
  kOrderedDict,  //
  kSet,          // of plain values
  kStorageType,  //
  kStorage,      //
  kTensor,       // or a Parameter
  kArray,  // NumPy's array, scalar, dtype or class of arrays, or a tuple of these and plain values
  kFunction,  // index: into kFunctions
  kOpaque,    // an opaque global, or the result of calling it
};

struct Value {
  Kind kind = Kind::kNothing;
  std::uint32_t index = 0;
};

bool is_plain(Value value) { return value.kind == Kind::kPlain || value.kind == Kind::kEmptyTuple; }

// Whether no tensor or storage can be reached from the value, now or later.
bool is_apart(Value value) { return is_plain(value) || value.kind == Kind::kArray; }

// The state of a mutable object, shared by all references to it.
struct Container {
  // A container in a container makes this false, because later items of the inner one are not seen.
  bool holds_plain_only = true;
  bool has_attributes = false;
};

// ------------------------------------------------------------------------------------- functions

// A function that a pickle may call.  Its signature has one character for each argument:
//
// - s storage, t tensor or parameter, p plain, l list of plain values
// - h hooks, which are stored and not examined; m metadata, whose values are tested for truth
// - ? the rest may be missing, * any number of plain arguments
// - # any number of plain arguments and NumPy's objects
//
// The kinds matter, because a function would read a tensor's values if it got the tensor as a
// number or sequence.
struct Function {
  std::string_view module;
  std::string_view name;
  std::string_view signature;
  Kind result;
};

constexpr std::array kFunctions = {
    Function{"torch._utils", "_rebuild_tensor_v2", "spppph?m", Kind::kTensor},
    Function{"torch._utils", "_rebuild_parameter", "tph", Kind::kTensor},
    Function{"collections", "OrderedDict", "", Kind::kOrderedDict},
    Function{"torch._utils", "_rebuild_tensor", "sppp", Kind::kTensor},
    Function{"torch._utils", "_rebuild_tensor_v3", "spppphp?m", Kind::kTensor},
    Function{"torch", "Size", "*", Kind::kPlain},
    Function{"torch", "device", "*", Kind::kPlain},
    Function{"_codecs", "encode", "*", Kind::kPlain},
    Function{"__builtin__", "set", "l", Kind::kSet},
    Function{"__builtin__", "frozenset", "l", Kind::kPlain},
    Function{"__builtin__", "xrange", "*", Kind::kPlain},
    Function{"__builtin__", "slice", "*", Kind::kPlain},
    Function{"datetime", "date", "*", Kind::kPlain},
    Function{"datetime", "datetime", "*", Kind::kPlain},
    Function{"datetime", "time", "*", Kind::kPlain},
    Function{"datetime", "timedelta", "*", Kind::kPlain},
    Function{"datetime", "timezone", "*", Kind::kPlain},
    Function{"decimal", "Decimal", "*", Kind::kPlain},
    Function{"pathlib", "PosixPath", "*", Kind::kPlain},
    Function{"pathlib", "PurePosixPath", "*", Kind::kPlain},
    Function{"pathlib", "PureWindowsPath", "*", Kind::kPlain},
    Function{"__builtin__", "bytes", "*", Kind::kPlain},
    Function{"__builtin__", "bytearray", "*", Kind::kPlain},
    Function{"__builtin__", "complex", "*", Kind::kPlain},
    Function{"numpy._core.multiarray", "scalar", "#", Kind::kArray},
    Function{"numpy.core.multiarray", "scalar", "#", Kind::kArray},
    Function{"numpy._core.multiarray", "_reconstruct", "#", Kind::kArray},
    Function{"numpy.core.multiarray", "_reconstruct", "#", Kind::kArray},
    Function{"numpy", "dtype", "#", Kind::kArray},
    Function{"builtins", "set", "l", Kind::kSet},
    Function{"builtins", "bytes", "*", Kind::kPlain},
    Function{"builtins", "bytearray", "*", Kind::kPlain},
    Function{"builtins", "complex", "*", Kind::kPlain},
};

bool is_storage_type(std::string_view module, std::string_view name) {
  if (module == "torch.storage") return name == "UntypedStorage" || name == "TypedStorage";
  const auto is_letter_or_digit = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  };
  return module == "torch" && name.ends_with("Storage") &&
         std::ranges::all_of(name, is_letter_or_digit);
}

// ----------------------------------------------------------------------------------------- machine

class Machine {
 public:
  Machine(std::string_view pickle, const std::unordered_set<std::string>& dtypes,
          const std::unordered_set<std::string>& opaque)
      : cursor_(pickle),
        dtypes_(dtypes),
        opaque_(opaque),
        max_memo_size_(std::max<std::size_t>(pickle.size(), 256)) {}

  bool run() {
    while (true) {
      const unsigned char op = cursor_.byte();
      if (cursor_.failed()) return false;
      if (op == opcode::kStop) return depth() > 0;
      const Step step = kSteps[op];
      // A truncated operand was used, but without effect.
      if (step == nullptr || !(this->*step)() || cursor_.failed()) return false;
    }
  }

 private:
  using Step = bool (Machine::*)();
  using Steps = std::array<Step, 256>;

  static constexpr Steps steps();
  static const Steps kSteps;

  // The number of values above the topmost mark; no opcode reaches below it.
  std::size_t depth() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

  bool push(Kind kind, std::size_t index = 0) {
    stack_.push_back({kind, static_cast<std::uint32_t>(index)});
    return true;
  }

  Value take_top() {
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }

  // Removes the topmost mark and returns the number of values above it; nothing without a mark.
  std::optional<std::size_t> take_mark() {
    if (marks_.empty()) return std::nullopt;
    const std::size_t n = depth();
    marks_.pop_back();
    return n;
  }

  std::span<const Value> top(std::size_t n) const { return std::span(stack_).last(n); }
  void drop(std::size_t n) { stack_.resize(stack_.size() - n); }

  // The elements of a tuple that is not plain; empty for any other value.
  std::span<const Value> elements(Value value) const {
    if (value.kind != Kind::kTuple) return {};
    const Tuple& tuple = tuples_[value.index];
    return std::span(elements_).subspan(tuple.begin, tuple.size);
  }

  // ---- plain values

  template <std::size_t NBytes>
  bool plain() {
    cursor_.take(NBytes);
    return push(Kind::kPlain);
  }
  bool plain_short() {
    cursor_.take(cursor_.byte());
    return push(Kind::kPlain);
  }
  bool plain_long() {
    cursor_.take(cursor_.little_endian_32());
    return push(Kind::kPlain);
  }

  // ---- the stack

  bool protocol() {
    cursor_.byte();  // the supported opcodes are the same in all protocols
    return true;
  }
  bool mark() {
    marks_.push_back(static_cast<std::uint32_t>(stack_.size()));
    return true;
  }
  bool pop() {
    if (depth() == 0) return false;  // Python's unpickler would take a mark, torch's does not
    stack_.pop_back();
    return true;
  }
  template <std::size_t N>
  bool tuple() {
    return depth() >= N && tuple_of(N);
  }
  bool marked_tuple() {
    const std::optional<std::size_t> n = take_mark();
    return n && tuple_of(*n);
  }
  bool tuple_of(std::size_t n);

  // ---- the memo

  bool put_short() { return put(cursor_.byte()); }
  bool put_long() { return put(cursor_.little_endian_32()); }
  bool get_short() { return get(cursor_.byte()); }
  bool get_long() { return get(cursor_.little_endian_32()); }
  bool put(std::size_t i);
  bool get(std::size_t i);

  // ---- containers

  template <Kind Made>
  bool container() {
    containers_.emplace_back();
    return push(Made, containers_.size() - 1);
  }
  bool empty_tuple() { return push(Kind::kEmptyTuple); }
  bool append() { return extend_list(1); }
  bool appends() {
    const std::optional<std::size_t> n = take_mark();
    return n && extend_list(*n);
  }
  bool set_item() { return update_dict(2); }
  bool set_items() {
    const std::optional<std::size_t> n = take_mark();
    return n && update_dict(*n);
  }
  bool extend_list(std::size_t n);
  bool update_dict(std::size_t n);
  void store(Value container, Value value) {
    if (!is_plain(value)) containers_[container.index].holds_plain_only = false;
  }

  // ---- everything that runs code

  bool global();
  bool persistent_id();
  bool reduce();
  bool new_object();
  bool build();
  bool accepts(std::string_view signature, Value arguments) const;
  bool accepts_one(char expected, Value argument) const;

  struct Tuple {
    std::uint32_t begin;
    std::uint32_t size;
  };

  Cursor cursor_;
  const std::unordered_set<std::string>& dtypes_;
  const std::unordered_set<std::string>& opaque_;
  std::size_t max_memo_size_;
  std::vector<Value> stack_;
  std::vector<std::uint32_t> marks_;  // sizes of the stack
  std::vector<Value> memo_;
  std::vector<Container> containers_;
  std::vector<Tuple> tuples_;
  std::vector<Value> elements_;  // of all tuples
};

bool Machine::tuple_of(std::size_t n) {
  const std::span<const Value> parts = top(n);
  Value result{n == 0 ? Kind::kEmptyTuple : Kind::kPlain, 0};
  if (std::ranges::all_of(parts, is_apart)) {
    if (!std::ranges::all_of(parts, is_plain)) result.kind = Kind::kArray;
  } else {
    result = {Kind::kTuple, static_cast<std::uint32_t>(tuples_.size())};
    tuples_.push_back(
        {static_cast<std::uint32_t>(elements_.size()), static_cast<std::uint32_t>(n)});
    elements_.insert(elements_.end(), parts.begin(), parts.end());
  }
  drop(n);
  stack_.push_back(result);
  return true;
}

bool Machine::put(std::size_t i) {
  // Bounds the memory.  Picklers count from 0 and write bytes for each entry: none is refused.
  if (depth() == 0 || i >= max_memo_size_) return false;
  if (i >= memo_.size()) memo_.resize(i + 1);
  memo_[i] = stack_.back();
  return true;
}

bool Machine::get(std::size_t i) {
  if (i >= memo_.size() || memo_[i].kind == Kind::kNothing) return false;
  stack_.push_back(memo_[i]);
  return true;
}

bool Machine::extend_list(std::size_t n) {
  // Accept only exact lists: any other object's `append` is called, which can be an attribute.
  if (depth() <= n) return false;
  const Value list = stack_[stack_.size() - n - 1];
  if (list.kind != Kind::kList && list.kind != Kind::kOpaque) return false;
  if (list.kind == Kind::kList) {
    for (const Value value : top(n)) store(list, value);
  }
  drop(n);
  return true;
}

bool Machine::update_dict(std::size_t n) {
  if (depth() <= n || n % 2 != 0) return false;
  const Value dict = stack_[stack_.size() - n - 1];
  const bool is_opaque = dict.kind == Kind::kOpaque;
  if (!is_opaque && dict.kind != Kind::kDict && dict.kind != Kind::kOrderedDict) return false;
  const std::span<const Value> items = top(is_opaque ? 0 : n);
  for (std::size_t i = 0; i < items.size(); i += 2) {
    // A tensor's hash is its address, but comparing it with another key of that hash reads values.
    if (!is_plain(items[i])) return false;
    store(dict, items[i + 1]);
  }
  drop(n);
  return true;
}

bool Machine::global() {
  const std::string_view module = cursor_.line();
  const std::string_view name = cursor_.line();
  for (std::size_t i = 0; i < kFunctions.size(); ++i) {
    if (kFunctions[i].name == name && kFunctions[i].module == module) {
      return push(Kind::kFunction, i);
    }
  }
  if (is_storage_type(module, name)) return push(Kind::kStorageType);
  if (module == "numpy" && name == "ndarray") return push(Kind::kArray);
  if (opaque_.contains(std::string(module) + '\n' + std::string(name))) {
    return push(Kind::kOpaque);
  }
  return module == "torch" && dtypes_.contains(std::string(name)) && push(Kind::kPlain);
}

bool Machine::persistent_id() {
  if (depth() == 0) return false;
  // ("storage", type, key, location, numel)
  const std::span<const Value> id = elements(take_top());
  if (id.size() != 5 || id[1].kind != Kind::kStorageType) return false;
  return std::ranges::count_if(id, is_plain) == 4 && push(Kind::kStorage);
}

bool Machine::reduce() {
  if (depth() < 2) return false;
  const Value arguments = take_top();
  const Value callable = take_top();
  if (callable.kind == Kind::kOpaque) return push(Kind::kOpaque);
  if (callable.kind != Kind::kFunction) return false;
  const Function& function = kFunctions[callable.index];
  if (!accepts(function.signature, arguments)) return false;
  return function.result == Kind::kOrderedDict ? container<Kind::kOrderedDict>()
                                               : push(function.result);
}

// Accepts only an opaque class, which is called like a function.
bool Machine::new_object() {
  return depth() >= 2 && stack_[stack_.size() - 2].kind == Kind::kOpaque && reduce();
}

bool Machine::accepts(std::string_view signature, Value arguments) const {
  if (signature == "*") return is_plain(arguments);
  if (signature == "#") return is_apart(arguments);
  if (signature.empty()) return arguments.kind == Kind::kEmptyTuple;
  for (const Value argument : elements(arguments)) {
    if (signature.starts_with('?')) signature.remove_prefix(1);
    if (signature.empty() || !accepts_one(signature.front(), argument)) return false;
    signature.remove_prefix(1);
  }
  return signature.empty() || signature.front() == '?';
}

bool Machine::accepts_one(char expected, Value argument) const {
  const bool is_list = argument.kind == Kind::kList;
  const bool is_dict = argument.kind == Kind::kDict || argument.kind == Kind::kOrderedDict;
  const bool is_flat = (is_list || is_dict) && containers_[argument.index].holds_plain_only;
  switch (expected) {
    case 's':
      return argument.kind == Kind::kStorage;
    case 't':
      return argument.kind == Kind::kTensor;
    case 'p':
      return is_plain(argument);
    case 'l':
      return is_list && is_flat;
    case 'h':
      return is_plain(argument) || is_dict;
    case 'm':
      return is_plain(argument) || (is_dict && is_flat);
    default:
      return false;
  }
}

bool Machine::build() {
  if (depth() < 2) return false;
  const Value state = take_top();
  const Value object = stack_.back();
  // An array takes bytes or plain values; an array of objects takes a list, which is refused.
  if (object.kind == Kind::kArray) return is_apart(state);
  if (object.kind == Kind::kOpaque) return true;
  // Accept only exact dicts and OrderedDicts, which run no method of the state.  Accept only one
  // state, because the second step would call an attribute __setstate__ of the first.
  if (object.kind != Kind::kOrderedDict || state.kind != Kind::kDict) return false;
  Container& container = containers_[object.index];
  if (container.has_attributes) return false;
  container = {.holds_plain_only = false, .has_attributes = true};
  return true;
}

// The opcodes of torch.save: pickle protocol 2, without EXT.
constexpr Machine::Steps Machine::steps() {
  Steps steps{};
  steps[opcode::kNone] = steps[opcode::kNewTrue] = steps[opcode::kNewFalse] = &Machine::plain<0>;
  steps[opcode::kBinInt1] = &Machine::plain<1>;
  steps[opcode::kBinInt2] = &Machine::plain<2>;
  steps[opcode::kBinInt] = &Machine::plain<4>;
  steps[opcode::kBinFloat] = &Machine::plain<8>;
  steps[opcode::kShortBinString] = steps[opcode::kLong1] = &Machine::plain_short;
  steps[opcode::kBinUnicode] = &Machine::plain_long;
  steps[opcode::kProto] = &Machine::protocol;
  steps[opcode::kMark] = &Machine::mark;
  steps[opcode::kPop] = &Machine::pop;
  steps[opcode::kBinPut] = &Machine::put_short;
  steps[opcode::kLongBinPut] = &Machine::put_long;
  steps[opcode::kBinGet] = &Machine::get_short;
  steps[opcode::kLongBinGet] = &Machine::get_long;
  steps[opcode::kEmptyTuple] = &Machine::empty_tuple;
  steps[opcode::kTuple1] = &Machine::tuple<1>;
  steps[opcode::kTuple2] = &Machine::tuple<2>;
  steps[opcode::kTuple3] = &Machine::tuple<3>;
  steps[opcode::kTuple] = &Machine::marked_tuple;
  steps[opcode::kEmptyList] = &Machine::container<Kind::kList>;
  steps[opcode::kEmptyDict] = &Machine::container<Kind::kDict>;
  steps[opcode::kAppend] = &Machine::append;
  steps[opcode::kAppends] = &Machine::appends;
  steps[opcode::kSetItem] = &Machine::set_item;
  steps[opcode::kSetItems] = &Machine::set_items;
  steps[opcode::kGlobal] = &Machine::global;
  steps[opcode::kBinPersId] = &Machine::persistent_id;
  steps[opcode::kReduce] = &Machine::reduce;
  steps[opcode::kNewObj] = &Machine::new_object;
  steps[opcode::kBuild] = &Machine::build;
  return steps;
}

constexpr Machine::Steps Machine::kSteps = Machine::steps();

}  // namespace

bool rebuilds_blindly(std::string_view pickle, const std::unordered_set<std::string>& dtypes,
                      const std::unordered_set<std::string>& opaque) {
  // Each byte adds at most one to any count of 32 bits.
  if (pickle.size() > std::numeric_limits<std::uint32_t>::max()) return false;
  return Machine(pickle, dtypes, opaque).run();
}

namespace {

// The argument of an opcode: bytes, a count and that many bytes, or lines.
struct Argument {
  std::uint8_t n_bytes = 0;
  std::uint8_t count_nbytes = 0;
  std::uint8_t n_lines = 0;
};

constexpr unsigned char kPut = 'p';
constexpr unsigned char kFrame = 0x95;

// By opcode, for protocols 0 to 5, from Python's pickletools.
constexpr std::array<Argument, 256> kArguments = [] {
  std::array<Argument, 256> table;
  const auto set = [&table](std::string_view codes, Argument argument) {
    for (const char code : codes) table[static_cast<unsigned char>(code)] = argument;
  };
  set("Khq\x80\x82", {.n_bytes = 1});
  set("M\x83", {.n_bytes = 2});
  set("Jjr\x84", {.n_bytes = 4});
  set("G\x95", {.n_bytes = 8});
  set("UC\x8a\x8c", {.count_nbytes = 1});
  set("TBX\x8b", {.count_nbytes = 4});
  set("\x8d\x8e\x96", {.count_nbytes = 8});
  set("ILSVFPgp", {.n_lines = 1});
  set("ci", {.n_lines = 2});
  return table;
}();

std::string cut_short(std::uint64_t nbytes) {
  return "it is cut short: " + std::to_string(nbytes) + " bytes of a value are not there";
}

// The decimal number of a PUT; the largest number if it is invalid.
std::uint64_t number_in(std::string_view line) {
  if (line.ends_with('\n')) line.remove_suffix(1);
  constexpr std::size_t kMaxDigits = 19;
  const bool is_number = !line.empty() && line.size() <= kMaxDigits &&
                         std::ranges::all_of(line, [](char c) { return c >= '0' && c <= '9'; });
  return is_number ? std::stoull(std::string(line)) : UINT64_MAX;
}

}  // namespace

std::optional<std::string> unjustified_claim(std::string_view pickle) {
  PickleCursor cursor(pickle);
  while (!cursor.at_end()) {
    const unsigned char code = cursor.byte();
    const auto [n_bytes, count_nbytes, n_lines] = kArguments[code];
    std::string_view argument = cursor.take(n_bytes);
    for (std::size_t i = 0; i < n_lines; ++i) argument = cursor.line();
    const std::uint64_t n_left = pickle.size() - cursor.position();
    if (count_nbytes != 0) {
      const std::uint64_t nbytes = little_endian(cursor.take(count_nbytes));
      if (nbytes > pickle.size() - cursor.position()) return cut_short(nbytes);
      cursor.skip(nbytes);
    } else if (code == opcode::kLongBinPut || code == kPut) {
      const std::uint64_t number = code == kPut ? number_in(argument) : little_endian(argument);
      if (number >= pickle.size()) {
        return "it numbers a value " + std::to_string(number) + ", and has " +
               std::to_string(pickle.size()) + " bytes";
      }
    } else if (code == kFrame && little_endian(argument) > n_left) {
      return "it is cut short: a part of it is not there";
    } else if (code == opcode::kStop) {
      return std::nullopt;
    }
  }
  return "it is cut short: it has no end";
}

}  // namespace ptsave
