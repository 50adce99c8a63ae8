// Analyses a pickle without running it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

namespace ptsave {

// Whether unpickling provably never reads the bytes of a tensor or storage, so that the pickle may
// be run before the bytes have arrived.
//
// True only for torch.save's pickles of plain tensors, parameters, and NumPy's arrays and scalars
// in plain containers.  False is always a safe answer, also for a malformed pickle.  For example,
// `_rebuild_tensor_v2` with a storage and plain numbers only passes the storage on.  The result is
// false if a tensor is used as a size, a dict key or a sequence, because it would be read.
// `dtypes` are the names of torch's dtypes, without "torch.".  `opaque` are globals,
// "module\nname", that are not called; objects that they would make are kept opaque.
//
// Pure; linear in the pickle's size in time and memory, for any pickle.
bool rebuilds_blindly(std::string_view pickle, const std::unordered_set<std::string>& dtypes,
                      const std::unordered_set<std::string>& opaque = {});

// The reason to refuse a pickle of any protocol, or nothing.  For a length with missing bytes, or a
// memo entry with a large number, Python's unpickler allocates gigabytes for a file of a few bytes.
// For example, b"\x80\x02Nr\xff\xff\xff\x7f." gives a value the number 2147483647.
//
// Pure; linear in the pickle's size in time.
std::optional<std::string> unjustified_claim(std::string_view pickle);

}  // namespace ptsave
