// Converts core's text and exceptions to Python's, for modules with and without torch.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace ptsave {

// Convert text without loss: bytes that are not valid UTF-8 become surrogates, and back.
pybind11::str decode(const std::string& text);
std::string encode(const pybind11::str& text);

// Translates a module's C++ exceptions into CorruptCheckpointError or OSError, with the file's
// name.
void register_errors(pybind11::module_& module);

}  // namespace ptsave
