// Refuses pickles that ask for more memory than their bytes justify, before anything is made.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ptsave {

// The reason to refuse a pickle of any protocol; nothing if there is none.  A length in front of
// bytes that are not there, or the number of a memo entry that nothing needs, makes Python's
// unpickler allocate gigabytes for a file of a few bytes.  For example
// b"\x80\x02Nr\xff\xff\xff\x7f." numbers a value 2147483647.
//
// Pure; linear in the pickle's size in time.
std::optional<std::string> unjustified_claim(std::string_view pickle);

}  // namespace ptsave
