// Analyses a pickle without running it.
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>

namespace ptsave {

// Whether unpickling provably passes every tensor and storage along without looking at its bytes,
// so that it may run before they have arrived.  True only for pickles as torch.save writes them for
// plain tensors, parameters and NumPy's arrays and scalars in plain containers; false is always a
// safe answer, and the one for a malformed pickle.  For example `_rebuild_tensor_v2` of a storage
// and plain numbers passes the storage on, and a tensor as a size, a dict key or a sequence would
// be looked at: false.  `dtypes` are the names of torch's dtypes, without "torch."; `opaque` are
// globals, "module\nname", of which nothing is called: all that they would make is kept as it is.
//
// Pure; linear in the pickle's size in time and memory, whatever the pickle says.
bool rebuilds_blindly(std::string_view pickle, const std::unordered_set<std::string>& dtypes,
                      const std::unordered_set<std::string>& opaque = {});

}  // namespace ptsave
