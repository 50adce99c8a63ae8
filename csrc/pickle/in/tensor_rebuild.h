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

// Offset, sizes and strides of a tensor in its storage; none of the numbers is negative.
struct Geometry {
  std::int64_t offset = 0;
  Dimensions sizes;
  Dimensions strides;
};

// A tensor that is nothing but its storage, geometry and flag.
struct PlainTensor {
  const c10::Storage& storage;
  c10::ScalarType dtype;
  const Geometry& geometry;
  bool requires_grad = false;
  PyObject* hooks = nullptr;  // a collections.OrderedDict, or null: then it gets none
};

// Sets the `_backward_hooks` of tensors.  The GIL is held wherever this is used.
class HooksSetter {
 public:
  HooksSetter();
  void set(PyObject* tensor, PyObject* hooks) const;

 private:
  Object name_;
  // torch.Tensor's descriptor of that name, as long as it is torch's own: setting an attribute
  // would look it up for each tensor.
  Object descriptor_;
  PyGetSetDef* direct_ = nullptr;
};

// The GIL is held wherever this is used.
class TensorRebuilder {
 public:
  explicit TensorRebuilder(const StorageReferences& storages);

  // The object that torch's function makes of the arguments, or nothing if it is not certain that
  // it makes one, or that it would be no other: then the function itself must be called.
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

// The tuple that a call makes of `arguments`; none if they are not iterable, which the call will
// say.
Object unpacked(PyObject* arguments);

// Refuses to make a quantized tensor that reaches beyond its storage: torch does not look.
// `arguments` are those of a function other than kNone.
void check_quantized(const Globals& globals, Rebuild function, Object arguments);

// Refuses to give a quantized tensor another storage, for the same reason.
void check_set_state(PyObject* object);

}  // namespace ptsave
