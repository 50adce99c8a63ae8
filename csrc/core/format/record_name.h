// Rules for record names, and a printable form of names from files.  Internal to archive.
#pragma once

#include <string>
#include <string_view>

namespace ptsave {

// Returns the rule that forbids `name` (without the archive's root) for a record, or nullptr.
const char* record_name_fault(std::string_view name);

// `text` for a message: cut if long, control characters masked.  Not always UTF-8.
std::string printable(std::string_view text);
std::string quoted(std::string_view text);

}  // namespace ptsave
