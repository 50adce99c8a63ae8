// Rebuilds tensors as torch._utils._rebuild_tensor* and _rebuild_parameter do, for plain arguments.
#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <span>

#include "pickle/in/memo.h"
#include "pickle/in/storage_references.h"
#include "pickle/in/torch_machine.h"

namespace ptsave {

using Dimensions = c10::SmallVector<std::int64_t, 5>;

// Offset, sizes and strides of a tensor in its storage, none negative.
struct Geometry {
  std::int64_t offset = 0;
  Dimensions sizes;
  Dimensions strides;
};

// A tensor that consists only of storage, dtype, geometry, flag and hooks.
struct PlainTensor {
  const c10::Storage& storage;
  c10::ScalarType dtype;
  const Geometry& geometry;
  bool requires_grad = false;
  PyObject* hooks = nullptr;  // a collections.OrderedDict, or null for none
};

// Sets the `_backward_hooks` of tensors.  Needs the GIL.
class HooksSetter {
 public:
  HooksSetter();
  void set(PyObject* tensor, PyObject* hooks) const;

 private:
  Object name_;
  // torch.Tensor's own descriptor of that name, or null if it was replaced.  Setting an attribute
  // would look it up for each tensor.
  Object descriptor_;
  PyGetSetDef* direct_ = nullptr;
};

// Rebuilds tensors without calling torch's functions.  Needs the GIL.
class TensorRebuilder {
 public:
  explicit TensorRebuilder(const StorageReferences& storages);

  // The object that torch's function makes from the arguments.  Nothing if it is not certain that
  // this is the same object; the function itself must then be called.
  Object rebuild(Rebuild function, std::span<const Value> arguments) const;
  Object rebuild(const PlainTensor& tensor) const;

 private:
  Object rebuild_tensor(Rebuild function, std::span<const Value> arguments) const;
  Object rebuild_checked(const PlainTensor& plain) const;
  Object rebuild_parameter(std::span<const Value> arguments) const;

  const StorageReferences& storages_;
  Object make_subclass_;  // torch.Tensor._make_subclass
  HooksSetter hooks_setter_;
};

// The tuple that a call makes from `arguments`; nothing if they are not iterable (the call fails).
Object unpacked(PyObject* arguments);

// Refuses a quantized tensor that reaches beyond its storage, which torch does not check.
// `function` is not kNone.
void check_quantized(const Globals& globals, Rebuild function, Object arguments);

// Refuses another storage for a quantized tensor, for the same reason.
void check_set_state(PyObject* object);

}  // namespace ptsave
