#include "pickle/scan.h"

#include <algorithm>
#include <cstdint>
#include <unordered_set>

namespace ptsave {
namespace {

// The front of a pickle that is being consumed; running past its end is remembered, not done.
class Cursor {
 public:
  explicit Cursor(std::string_view bytes) : rest_(bytes) {}

  bool failed() const { return failed_; }

  unsigned char byte() {
    const std::string_view taken = take(1);
    return taken.empty() ? 0 : static_cast<unsigned char>(taken.front());
  }

  std::uint32_t little_endian_32() {
    std::uint32_t value = 0;
    for (int shift = 0; shift < 32; shift += 8) value |= std::uint32_t{byte()} << shift;
    return value;
  }

  std::string_view take(std::size_t n) {
    if (n > rest_.size()) {
      failed_ = true;
      n = rest_.size();
    }
    const std::string_view taken = rest_.substr(0, n);
    rest_.remove_prefix(n);
    return taken;
  }

  std::string_view line() {
    const std::size_t end = rest_.find('\n');
    if (end == std::string_view::npos) {
      failed_ = true;
      return {};
    }
    const std::string_view taken = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return taken;
  }

 private:
  std::string_view rest_;
  bool failed_ = false;
};

// How many operand bytes follow an opcode that has a fixed number of them; -1 for any other.
int operand_nbytes(char opcode) {
  switch (opcode) {
    case 'a': case 'e': case 's': case 'u': case '(': case '0': case 't':  // NOLINT
    case '\x85': case '\x86': case '\x87': case 'N': case '\x88': case '\x89':
    case ')': case ']': case '}': case '\x81': case 'R': case 'b': case 'Q':
      return 0;
    case 'K': case 'h': case 'q': case '\x80':
      return 1;
    case 'M':
      return 2;
    case 'J': case 'j': case 'r':
      return 4;
    case 'G':
      return 8;
    default:
      return -1;
  }
}

}  // namespace

std::optional<std::vector<std::string>> scan_globals(std::string_view pickle) {
  std::unordered_set<std::string> globals;
  Cursor cursor(pickle);
  while (!cursor.failed()) {
    const char opcode = static_cast<char>(cursor.byte());
    const int nbytes = operand_nbytes(opcode);
    if (nbytes >= 0) {
      cursor.take(static_cast<std::size_t>(nbytes));
    } else if (opcode == 'X') {  // BINUNICODE
      cursor.take(cursor.little_endian_32());
    } else if (opcode == 'U' || opcode == '\x8a') {  // SHORT_BINSTRING, LONG1
      cursor.take(cursor.byte());
    } else if (opcode == 'c') {  // GLOBAL
      std::string name(cursor.line());
      name.append(" ").append(cursor.line());
      globals.insert(std::move(name));
    } else if (opcode == '.' && !cursor.failed()) {  // STOP
      return std::vector<std::string>(globals.begin(), globals.end());
    } else {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

}  // namespace ptsave
