// Makes the outline of a saved object: its containers and values, with facts in place of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/owner.h"
#include "pickle/common/object.h"

namespace ptsave {

// Finds the records of storages, for outline().
class StorageRecords : public Interface {
 public:
  // The number of the record data/<key>, if it exists and has exactly `nbytes` bytes.
  virtual std::optional<std::size_t> find(std::string_view key, std::uint64_t nbytes) = 0;
  // The object that stands for a storage's place in the outline.
  virtual Object place_of(std::size_t record, PyObject* location) = 0;
};

// Makes the Python type whose instances stand for tensors: (facts, place).
Object make_outlined_tensor_type();

// The object that weights_only=True makes from a pickle, without torch.  Each tensor and parameter
// is an instance of `tensor_type`, from make_outlined_tensor_type().  Its facts are (dtype, shape,
// stride, offset in the storage, size, size of the storage), the last three in bytes.  They equal
// tensor_facts() of bindings/columns.cpp, except that the dtype is a name.  The tensor's place is
// its storage's place, or None for an empty storage.
//
// Returns nothing if only torch can read the pickle.  It accepts torch.save's pickles of plain
// tensors within their storages, parameters, numbers and text in dicts, lists and tuples.  So it
// never imports or calls a global of the pickle, and its memory is in proportion to the pickle's
// size.  Throws PythonError if there is no memory or a signal handler raises.  Needs the GIL.
Object outline(std::string_view pickle, StorageRecords& records, PyTypeObject* tensor_type);

}  // namespace ptsave
