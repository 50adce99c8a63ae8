// A look at a pickle without running it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ptsave {

// The globals ("module name", as the opcode spells them) that a pickle names, each once, or nothing if
// it holds an opcode that torch.save does not write (then what it calls cannot be told this way) or is
// malformed.  Pure; needs memory proportional to the distinct globals.
std::optional<std::vector<std::string>> scan_globals(std::string_view pickle);

}  // namespace ptsave
