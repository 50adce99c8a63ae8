// Finds pickles that would make an unpickler allocate more memory than their bytes justify.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ptsave {

// The reason to refuse a pickle of any protocol, or nothing.  For a length with missing bytes, or a
// memo entry with a large number, Python's unpickler allocates gigabytes for a file of a few bytes.
// For example, b"\x80\x02Nr\xff\xff\xff\x7f." numbers a value 2147483647.
//
// Pure; linear in the pickle's size in time.
std::optional<std::string> unjustified_claim(std::string_view pickle);

}  // namespace ptsave
