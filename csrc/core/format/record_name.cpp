#include "core/format/record_name.h"

#include <algorithm>
#include <cstddef>

namespace ptsave {
namespace {

bool has_parent_component(std::string_view name) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") return true;
    begin = end + 1;
  }
  return false;
}

}  // namespace

const char* record_name_fault(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name.front() == '/') return "starts with '/'";
  if (name.find('\0') != std::string_view::npos) return "holds a NUL";
  if (has_parent_component(name)) return "has a '..' component";
  return nullptr;
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMaxShown = 200;
  std::string out(text.substr(0, kMaxShown));
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  std::replace_if(out.begin(), out.end(), is_control, '?');
  return text.size() > kMaxShown ? out + "..." : out;
}

std::string quoted(std::string_view text) { return "'" + printable(text) + "'"; }

}  // namespace ptsave
