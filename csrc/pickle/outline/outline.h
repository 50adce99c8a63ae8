// Makes the outline of a saved object: its containers and values, and facts in place of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "pickle/common/object.h"

namespace ptsave {

// Finds the records of storages, for outline().
class StorageRecords {
 public:
  StorageRecords() = default;
  StorageRecords(const StorageRecords&) = delete;
  StorageRecords& operator=(const StorageRecords&) = delete;
  virtual ~StorageRecords() = default;

  // The number of the record data/<key>, if there is one of exactly `nbytes` bytes.
  virtual std::optional<std::size_t> find(std::string_view key, std::uint64_t nbytes) = 0;
  // The place of a storage, as the outline has it.
  virtual Object place_of(std::size_t record, PyObject* location) = 0;
};

// Makes the type of Python's whose instances stand for tensors: (facts, place).
Object make_outlined_tensor_type();

// The object that weights_only=True makes of a pickle, without torch: each tensor and parameter is
// an instance of `tensor_type`, which make_outlined_tensor_type() has made.  Its facts are (dtype,
// shape, stride, offset in the storage, size, size of the storage; all three in bytes), as
// bindings/listing.cpp has them but for the dtype, which is its name; its place is that of its
// storage, None for an empty one.
//
// Nothing unless the pickle is as torch.save writes it for plain tensors, parameters, numbers and
// text in dicts, lists and tuples, and each tensor lies within its storage: torch must say then
// what it is.  So this imports and calls nothing that a pickle names, and takes memory in
// proportion to the pickle's size.  PythonError: there is no memory, or a signal handler has
// raised.  The GIL is held throughout.
Object outline(std::string_view pickle, StorageRecords& records, PyTypeObject* tensor_type);

}  // namespace ptsave
