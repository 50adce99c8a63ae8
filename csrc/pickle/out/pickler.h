// Pickles an object:  `data.pkl` byte for byte as Python's pickler writes it under torch.save, and
// the storages it refers to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "pickle/common/object.h"

namespace ptsave {

struct PickledObject {
  Object data;                         // bytes: the contents of the record data.pkl
  std::vector<c10::Storage> storages;  // storage i is the record data/i, if they are not numbered
};

// Numbers the record of a storage that the pickle meets for the first time.  `tensor` refers to it,
// unless the storage is referred to by itself; `dtype` is that of the reference.
using StorageNumbering = std::function<std::uint32_t(
    const c10::Storage& storage, const at::Tensor* tensor, c10::ScalarType dtype)>;

// Pickles `object` with protocol 2 as torch.save does.  Returns nothing if the object needs
// Python's pickler: other types, tensors with attributes, hooks or dispatch keys of their own,
// torch modes, replaced methods, registered reducers and packages, 400 levels of nesting.  Nothing
// has been changed or called then that could be noticed.  PythonError: the error of Python's
// pickler.  The GIL is held throughout.
// Without `numbering` storages are numbered in the order in which they are met.
std::optional<PickledObject> pickle_object(PyObject* object,
                                           const StorageNumbering& numbering = {});

}  // namespace ptsave
