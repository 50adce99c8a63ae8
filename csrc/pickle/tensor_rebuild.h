// What torch._utils._rebuild_tensor* and _rebuild_parameter do, for plain arguments.
#pragma once

#include <Python.h>

#include <span>

#include "pickle/memo.h"
#include "pickle/storage_references.h"
#include "pickle/torch_machine.h"

namespace ptsave {

// The GIL is held wherever this is used.
class TensorRebuilder {
 public:
  explicit TensorRebuilder(const StorageReferences& storages);

  // The object that torch's function makes of the arguments, or nothing if it is not certain that
  // it makes one, or that it would be no other: then the function itself must be called.
  Object rebuild(Rebuild function, std::span<const Value> arguments) const;

 private:
  Object rebuild_tensor(Rebuild function, std::span<const Value> arguments) const;
  Object rebuild_parameter(std::span<const Value> arguments) const;

  const StorageReferences& storages_;
  Object make_subclass_;   // torch.Tensor._make_subclass
  Object backward_hooks_;  // "_backward_hooks"
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
