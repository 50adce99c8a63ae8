// The object graph on its way in: the restricted machine behind weights_only=True.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <string_view>

#include "pickle/object.h"

namespace ptsave {

// Where the machine finds the bytes behind tensors.
class StorageSource {
 public:
  StorageSource() = default;
  StorageSource(const StorageSource&) = delete;
  StorageSource& operator=(const StorageSource&) = delete;
  virtual ~StorageSource() = default;

  // The storage of the record data/<key>, if there is one of exactly `nbytes` bytes and what was
  // saved at `location` has a known place: the same for the same key, and possibly still being
  // filled.  It is the source's, until the pickle has been run.  Of 0 bytes it is a new one each
  // time, to be copied before the next call.  Otherwise null: torch's own rule says then where it
  // goes, or what is wrong.
  virtual const c10::Storage* storage_of(std::string_view key, std::uint64_t nbytes,
                                         std::string_view location) = 0;
};

// Rebuilds what torch's restricted unpickler (torch._weights_only_unpickler) would rebuild, under
// that module's policy as it is at the call.
//
// `persistent_load` is torch's, and is called for whatever `storages` does not have; with null
// `storages` for every reference.  `encoding` is a str, as torch passes it on.  PythonError: what
// torch's unpickler would raise.  The GIL is held throughout.
Object unpickle_weights_only(std::string_view pickle, PyObject* persistent_load, PyObject* encoding,
                             StorageSource* storages);

}  // namespace ptsave
