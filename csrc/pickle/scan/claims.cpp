#include "pickle/scan/claims.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "pickle/common/opcodes.h"

namespace ptsave {
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
