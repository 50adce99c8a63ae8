// Text and exceptions of core as Python's; for modules with and without torch.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace ptsave {

// Bytes of a hostile file are kept: not valid UTF-8 becomes surrogates, and back.
pybind11::str decode(const std::string& text);
std::string encode(const pybind11::str& text);

// Gives a module its FormatError; what this module throws becomes that, or an OSError.
void register_errors(pybind11::module_& module);

}  // namespace ptsave
