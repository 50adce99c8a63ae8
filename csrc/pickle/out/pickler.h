// Pickles an object:  `data.pkl` byte for byte as Python's pickler writes it under torch.save, and
// the storages it refers to.
#pragma once

#include <c10/core/Storage.h>

#include <optional>
#include <vector>

#include "pickle/common/object.h"

namespace ptsave {

struct PickledObject {
  Object data;                         // bytes: the contents of the record data.pkl
  std::vector<c10::Storage> storages;  // storage i is the record data/i
};

// Pickles `object` with protocol 2 as torch.save does.  Returns nothing if the object needs
// Python's pickler: other types, tensors with attributes, hooks or dispatch keys of their own,
// torch modes, replaced methods, registered reducers and packages, 400 levels of nesting.  Nothing
// has been changed or called then that could be noticed.  PythonError: the error of Python's
// pickler.  The GIL is held throughout.
std::optional<PickledObject> pickle_object(PyObject* object);

}  // namespace ptsave
