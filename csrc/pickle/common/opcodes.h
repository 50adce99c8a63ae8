// The opcodes of pickle protocol 2 that ptsave writes or reads, and a cursor over a pickle.
//
// Pure; does not allocate.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ptsave {

// Named as in Python's pickle module.
namespace opcode {

inline constexpr unsigned char kMark = '(';
inline constexpr unsigned char kStop = '.';
inline constexpr unsigned char kPop = '0';
inline constexpr unsigned char kPopMark = '1';
inline constexpr unsigned char kBinInt = 'J';
inline constexpr unsigned char kBinInt1 = 'K';
inline constexpr unsigned char kBinInt2 = 'M';
inline constexpr unsigned char kNone = 'N';
inline constexpr unsigned char kBinPersId = 'Q';
inline constexpr unsigned char kReduce = 'R';
inline constexpr unsigned char kShortBinString = 'U';
inline constexpr unsigned char kBinUnicode = 'X';
inline constexpr unsigned char kAppend = 'a';
inline constexpr unsigned char kBuild = 'b';
inline constexpr unsigned char kGlobal = 'c';
inline constexpr unsigned char kEmptyDict = '}';
inline constexpr unsigned char kAppends = 'e';
inline constexpr unsigned char kBinGet = 'h';
inline constexpr unsigned char kLongBinGet = 'j';
inline constexpr unsigned char kEmptyList = ']';
inline constexpr unsigned char kBinPut = 'q';
inline constexpr unsigned char kLongBinPut = 'r';
inline constexpr unsigned char kSetItem = 's';
inline constexpr unsigned char kTuple = 't';
inline constexpr unsigned char kEmptyTuple = ')';
inline constexpr unsigned char kSetItems = 'u';
inline constexpr unsigned char kBinFloat = 'G';
inline constexpr unsigned char kProto = 0x80;
inline constexpr unsigned char kNewObj = 0x81;
inline constexpr unsigned char kTuple1 = 0x85;
inline constexpr unsigned char kTuple2 = 0x86;
inline constexpr unsigned char kTuple3 = 0x87;
inline constexpr unsigned char kNewTrue = 0x88;
inline constexpr unsigned char kNewFalse = 0x89;
inline constexpr unsigned char kLong1 = 0x8a;
inline constexpr unsigned char kLong4 = 0x8b;
inline constexpr unsigned char kEmptySet = 0x8f;

// For tuples of 1, 2 and 3 values; longer tuples use a mark and kTuple.
inline constexpr std::array kTuples = {kTuple1, kTuple2, kTuple3};

}  // namespace opcode

// Reads a little-endian integer of at most eight bytes, like all integers of a pickle.
inline std::uint64_t little_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | static_cast<unsigned char>(bytes[i]);
  }
  return value;
}

// An integer in at most eight bytes of two's complement, and a float in eight bytes, big-endian.
inline std::int64_t signed_integer(std::string_view bytes) {
  if (bytes.empty()) return 0;
  const std::size_t n_unused = 8 * (sizeof(std::int64_t) - bytes.size());
  return static_cast<std::int64_t>(little_endian(bytes) << n_unused) >> n_unused;
}
inline double big_endian_real(std::string_view bytes) {
  std::uint64_t bits = 0;
  for (const char byte : bytes) bits = bits << 8 | static_cast<unsigned char>(byte);
  return std::bit_cast<double>(bits);
}

// A position in a pickle.  Like a Python file, it returns fewer bytes at the end.
class PickleCursor {
 public:
  explicit PickleCursor(std::string_view pickle) : pickle_(pickle) {}

  std::size_t size() const { return pickle_.size(); }
  std::size_t position() const { return position_; }
  bool at_end() const { return position_ == pickle_.size(); }

  // Not to be called at the end.
  unsigned char peek() const { return static_cast<unsigned char>(pickle_[position_]); }
  unsigned char byte() { return static_cast<unsigned char>(pickle_[position_++]); }

  void skip(std::size_t n) { position_ += std::min(n, pickle_.size() - position_); }

  std::string_view take(std::size_t n) {
    const std::size_t begin = position_;
    skip(n);
    return {pickle_.data() + begin, position_ - begin};
  }

  // Takes a line with its newline, if there is one.
  std::string_view line() {
    const std::size_t newline = pickle_.find('\n', position_);
    return take(newline == std::string_view::npos ? newline : newline + 1 - position_);
  }

 private:
  std::string_view pickle_;
  std::size_t position_ = 0;
};

}  // namespace ptsave
