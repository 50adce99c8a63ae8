// The object graph on its way out: `data.pkl` byte for byte as Python's pickler writes it under
// torch.save, and the storages it refers to.
#pragma once

#include <c10/core/Storage.h>

#include <optional>
#include <vector>

#include "pickle/object.h"

namespace ptsave {

struct PickledObject {
  Object data;                         // bytes: the contents of the record data.pkl
  std::vector<c10::Storage> storages;  // storage i is the record data/i
};

// Pickles `object` with protocol 2 as torch.save does, or returns nothing if it holds anything
// whose pickle only Python's pickler knows; nothing has been changed or called then that could be
// noticed. PythonError: what Python's pickler would raise.  The GIL is held throughout.
std::optional<PickledObject> pickle_object(PyObject* object);

}  // namespace ptsave
