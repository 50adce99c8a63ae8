// Unpickles an object for weights_only=True.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <string_view>

#include "core/base/owner.h"
#include "pickle/common/object.h"

namespace ptsave {

// Finds the storages behind tensors, for the machine.
class StorageSource : public Interface {
 public:
  // The storage of the record data/<key>, if the record has exactly `nbytes` bytes and the device
  // for `location` is known.  Otherwise null: torch's own rule then finds the device, or raises the
  // error.  The same key always gives the same storage, which may still be filling.  The source
  // owns it until the pickle has been run.  A storage of 0 bytes is a new one each time, valid
  // until the next call.
  virtual const c10::Storage* storage_of(std::string_view key, std::uint64_t nbytes,
                                         std::string_view location) = 0;
};

// Rebuilds the same object as torch's restricted unpickler (torch._weights_only_unpickler), under
// that module's current policy.
//
// `persistent_load` is torch's function.  It resolves the references that `storages`, which may be
// null, does not resolve.  `encoding` is a str, as for torch.  A non-null `unpickler_type` is a
// subclass of torch's unpickler that allows more, and takes torch's steps.  Throws PythonError with
// the errors of torch's unpickler.  Needs the GIL.
//
// If torch's machine fails by accident (IndexError, EOFError, ...), the error is also an
// UnpicklingError and gives the offset in data.pkl.  Three things are refused although torch
// accepts them.  They are quantized tensors that reach beyond their storage (torch crashes later),
// tuples whose hashing overflows the C stack or never ends, and a bytearray(n) larger than the
// pickle.
Object unpickle_weights_only(std::string_view pickle, PyObject* persistent_load, PyObject* encoding,
                             StorageSource* storages, PyObject* unpickler_type = nullptr);

}  // namespace ptsave
