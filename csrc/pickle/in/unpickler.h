// Unpickles an object: the restricted machine behind weights_only=True.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <string_view>

#include "pickle/common/object.h"

namespace ptsave {

// Finds the storages behind tensors, for the machine.
class StorageSource {
 public:
  StorageSource() = default;
  StorageSource(const StorageSource&) = delete;
  StorageSource& operator=(const StorageSource&) = delete;
  virtual ~StorageSource() = default;

  // The storage of the record data/<key>, if there is one of exactly `nbytes` bytes and storages
  // from `location` have a known place: the same for the same key, and possibly still being filled.
  // It is the source's, until the pickle has been run.  Of 0 bytes it is a new one each time, to be
  // copied before the next call.  Otherwise null: torch's own rule then finds the place, or raises
  // the error.
  virtual const c10::Storage* storage_of(std::string_view key, std::uint64_t nbytes,
                                         std::string_view location) = 0;
};

// Rebuilds the same object as torch's restricted unpickler (torch._weights_only_unpickler), under
// that module's policy as it is at the call.
//
// `persistent_load` is torch's, and is called for references that `storages` does not have; with
// null `storages` for every one.  `encoding` is a str, as torch passes it on.  The steps that are
// torch's are taken by an `unpickler_type`, a subclass of torch's that allows more, if it is not
// null.  PythonError: the error of that unpickler.  The GIL is held throughout.
//
// Where torch's machine fails without having meant to (IndexError, EOFError, ...), the error is
// also an UnpicklingError and says where in data.pkl.  Refused although torch accepts them:
// quantized tensors that reach beyond their storage (torch crashes later), tuples nested so that
// hashing them overflows the C stack or never ends, and a bytearray(n) larger than the pickle.
Object unpickle_weights_only(std::string_view pickle, PyObject* persistent_load, PyObject* encoding,
                             StorageSource* storages, PyObject* unpickler_type = nullptr);

}  // namespace ptsave
