// Pickles an object: makes torch.save's `data.pkl`, byte for byte, and the list of its storages.
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
  std::vector<c10::Storage> storages;  // storage i is the record data/i, unless they are numbered
};

// Returns the record number for a storage's first reference.  `tensor` refers to the storage, or is
// null if the storage is saved by itself; `dtype` is the reference's.
using StorageNumbering = std::function<std::uint32_t(
    const c10::Storage& storage, const at::Tensor* tensor, c10::ScalarType dtype)>;

// Pickles `object` with protocol 2 as torch.save does.  Returns nothing, without any visible
// effect, if the object needs Python's pickler.  Examples are other types, tensors with attributes,
// hooks or special dispatch keys, torch modes, replaced methods, registered reducers and packages,
// and 400 levels of nesting.  Throws PythonError with the error of Python's pickler.  Without
// `numbering`, storages are numbered by their first reference.  Needs the GIL.
std::optional<PickledObject> pickle_object(PyObject* object,
                                           const StorageNumbering& numbering = {});

}  // namespace ptsave
