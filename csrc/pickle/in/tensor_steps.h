// Recognizes all opcodes of a plain tensor's arguments at once, because a checkpoint of many small
// tensors consists of little else.
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

// A plain tensor's arguments, read from 26 opcodes, with borrowed objects from the memo.
struct TensorSteps {
  // The persistent id ("storage", type, key, location, numel).
  PyObject* word = nullptr;
  PyObject* storage_type = nullptr;
  std::string_view key;       // a number as torch writes it
  std::string_view location;  // borrowed
  std::int64_t numel = 0;
  // The other arguments of _rebuild_tensor_v2.
  Geometry geometry;
  bool requires_grad = false;
  PyObject* hooks_type = nullptr;  // called without arguments

  // Takes the steps from behind the arguments' MARK up to REDUCE.  Nothing, without any effect, if
  // there are other steps, or if one would write a memo entry that the pickle reads.
  static std::optional<TensorSteps> take(PickleCursor& cursor, const Memo& memo);
};

}  // namespace ptsave
