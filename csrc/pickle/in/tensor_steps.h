// Recognizes the opcodes that torch.save writes for the arguments of a plain tensor as a whole,
// because a checkpoint of many small tensors consists of little else.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "pickle/common/opcodes.h"
#include "pickle/in/memo.h"
#include "pickle/in/tensor_rebuild.h"

namespace ptsave {

// Arguments of a plain tensor, read from its 26 opcodes, with borrowed objects out of the memo.
struct TensorSteps {
  // Of the persistent id ("storage", type, key, location, numel).
  PyObject* word = nullptr;
  PyObject* storage_type = nullptr;
  std::string_view key;       // a number as torch writes it
  std::string_view location;  // borrowed as well
  std::int64_t numel = 0;
  // The other arguments of _rebuild_tensor_v2.
  Geometry geometry;
  bool requires_grad = false;
  PyObject* hooks_type = nullptr;  // is called without arguments

  // Takes the steps from behind the MARK of the arguments up to REDUCE.  Nothing if there are
  // others, or if an entry of the memo that is read somewhere would be made on the way; then
  // nothing has happened.
  static std::optional<TensorSteps> take(PickleCursor& cursor, const Memo& memo);
};

}  // namespace ptsave
