// An abstract machine.  It takes the steps of Python's and torch's unpicklers, but with kinds of
// values (plain, storage, tensor, container, ...) instead of values.  It refuses all other steps.
#include "pickle/scan/scan.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "pickle/common/opcodes.h"
#include "pickle/common/stack_machine.h"

namespace ptsave {
namespace {

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
  // A container in a container makes this false, because items that the inner one gets later are
  // not seen.
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

class Machine final : public StackMachine<Machine, Value> {
 public:
  Machine(std::string_view pickle, const std::unordered_set<std::string>& dtypes,
          const std::unordered_set<std::string>& opaque)
      : StackMachine(pickle),
        dtypes_(dtypes),
        opaque_(opaque),
        max_memo_size_(std::max<std::size_t>(pickle.size(), 256)) {}

  // Throws Declined.
  void run() {
    for (unsigned char code = byte(); code != opcode::kStop; code = byte()) step(code);
    top();
  }

 private:
  friend StackMachine;

  void push_new(Kind kind, std::size_t index = 0) {
    push({kind, static_cast<std::uint32_t>(index)});
  }

  // The elements of a tuple that is not plain; empty for any other value.
  std::span<const Value> elements(Value value) const {
    if (value.kind != Kind::kTuple) return {};
    const Tuple& tuple = tuples_[value.index];
    return std::span(elements_).subspan(tuple.begin, tuple.size);
  }

  void protocol(unsigned char /*n*/) {}  // the supported opcodes are the same in all protocols
  void constant(unsigned char /*code*/, std::string_view /*operand*/) { push_new(Kind::kPlain); }
  bool keep(std::uint32_t i) const {
    // Bounds the memory.  Picklers count from 0 and write bytes for each entry, so their pickles
    // are not refused.
    if (i >= max_memo_size_) throw Declined{};
    return true;
  }

  void make_tuple(std::size_t n) {
    const std::span<const Value> parts = last(n);
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
    push(result);
  }

  void new_container(Kind kind) {
    containers_.emplace_back();
    push_new(kind, containers_.size() - 1);
  }
  void new_list() { new_container(Kind::kList); }
  void new_dict() { new_container(Kind::kDict); }
  void append(Value list, std::span<const Value> values) {
    if (list.kind == Kind::kOpaque) return;
    // Accept only exact lists: any other object's `append` is called, which can be an attribute.
    if (list.kind != Kind::kList) throw Declined{};
    for (const Value value : values) store(list, value);
  }
  void set_items(Value dict, std::span<const Value> items) {
    if (dict.kind == Kind::kOpaque) return;
    if (dict.kind != Kind::kDict && dict.kind != Kind::kOrderedDict) throw Declined{};
    for (std::size_t i = 0; i < items.size(); i += 2) {
      // A tensor's hash is its address, but comparing it with another key of that hash reads
      // values.
      if (!is_plain(items[i])) throw Declined{};
      store(dict, items[i + 1]);
    }
  }
  void store(Value container, Value value) {
    if (!is_plain(value)) containers_[container.index].holds_plain_only = false;
  }

  void global(std::string_view module, std::string_view name) {
    for (std::size_t i = 0; i < kFunctions.size(); ++i) {
      if (kFunctions[i].name == name && kFunctions[i].module == module) {
        return push_new(Kind::kFunction, i);
      }
    }
    if (is_storage_type(module, name)) return push_new(Kind::kStorageType);
    if (module == "numpy" && name == "ndarray") return push_new(Kind::kArray);
    if (opaque_.contains(std::string(module) + '\n' + std::string(name))) {
      return push_new(Kind::kOpaque);
    }
    if (module != "torch" || !dtypes_.contains(std::string(name))) throw Declined{};
    push_new(Kind::kPlain);
  }

  void persistent_id() {
    // ("storage", type, key, location, numel)
    const std::span<const Value> id = elements(pop());
    if (id.size() != 5 || id[1].kind != Kind::kStorageType) throw Declined{};
    if (std::ranges::count_if(id, is_plain) != 4) throw Declined{};
    push_new(Kind::kStorage);
  }
  void reduce() {
    const Value arguments = pop();
    const Value callable = pop();
    if (callable.kind == Kind::kOpaque) return push_new(Kind::kOpaque);
    if (callable.kind != Kind::kFunction) throw Declined{};
    const Function& function = kFunctions[callable.index];
    if (!accepts(function.signature, arguments)) throw Declined{};
    if (function.result == Kind::kOrderedDict) return new_container(Kind::kOrderedDict);
    push_new(function.result);
  }

  void build() {
    const Value state = pop();
    const Value object = top();
    if (object.kind == Kind::kOpaque) return;
    // An array takes bytes or plain values; an array of objects takes a list, which is refused.
    if (object.kind == Kind::kArray && is_apart(state)) return;
    // Accept only exact dicts and OrderedDicts, which run no method of the state.  Accept only one
    // state, because the second step would call an attribute __setstate__ of the first.
    if (object.kind != Kind::kOrderedDict || state.kind != Kind::kDict) throw Declined{};
    Container& container = containers_[object.index];
    if (container.has_attributes) throw Declined{};
    container = {.holds_plain_only = false, .has_attributes = true};
  }

  void other_step(unsigned char code) {
    if (code == opcode::kPop) {
      pop();  // Python's unpickler would take a mark, torch's does not
    } else if (code == opcode::kNewObj && top(2).kind == Kind::kOpaque) {
      reduce();  // an opaque class is called like a function
    } else {
      throw Declined{};
    }
  }
  bool accepts(std::string_view signature, Value arguments) const {
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

  bool accepts_one(char expected, Value argument) const {
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

  struct Tuple {
    std::uint32_t begin;
    std::uint32_t size;
  };

  const std::unordered_set<std::string>& dtypes_;
  const std::unordered_set<std::string>& opaque_;
  std::size_t max_memo_size_;
  std::vector<Container> containers_;
  std::vector<Tuple> tuples_;
  std::vector<Value> elements_;  // of all tuples
};

}  // namespace

bool rebuilds_blindly(std::string_view pickle, const std::unordered_set<std::string>& dtypes,
                      const std::unordered_set<std::string>& opaque) {
  // Each byte adds at most one to any count of 32 bits.
  if (pickle.size() > std::numeric_limits<std::uint32_t>::max()) return false;
  try {
    Machine(pickle, dtypes, opaque).run();
    return true;
  } catch (const Declined&) {
    return false;
  }
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
  return "it is cut short: a value of " + std::to_string(nbytes) + " bytes is incomplete";
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
        return "it gives a value the number " + std::to_string(number) + ", and has only " +
               std::to_string(pickle.size()) + " bytes";
      }
    } else if (code == kFrame && little_endian(argument) > n_left) {
      return "it is cut short: a part of it is missing";
    } else if (code == opcode::kStop) {
      return std::nullopt;
    }
  }
  return "it is cut short: it has no end";
}

}  // namespace ptsave
