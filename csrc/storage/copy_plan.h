// Plans copies from tensors whose bytes are still in an archive into existing tensors.  A copy is a
// read straight into place if dtype, strides and conjugation agree.  The same bytes for a second
// tensor are copied from the first.  Copies to overlapping targets keep their order, unless they
// copy the same bytes (tied parameters).
//
// These functions do not need the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/read/placement.h"

namespace ptsave {

// A planned target.copy_(source).  The source is a tensor with values, or a view of a record.  A
// view is described by its place in the record's storage, because a reference to the storage would
// keep its memory.
struct TensorCopy {
  TensorCopy(at::Tensor to, const at::Tensor& from, std::optional<std::size_t> of_record);

  // Copies all bytes of a record.
  TensorCopy(at::Tensor to, std::size_t of_record);

  // The source, as a view of its record's storage.
  at::Tensor source_in(const c10::Storage& storage) const;

  at::Tensor target;
  std::optional<std::size_t> record;
  at::Tensor source;  // undefined if there is a record
  c10::ScalarType dtype;
  std::int64_t offset;  // in elements
  at::DimVector sizes;
  at::DimVector strides;
  bool conj;
  bool neg;
};

// The steps for a list of copies, which are identified by their indices.  First the destinations
// are read, then repeated copies are made from other copies' targets, then the others in their
// order.
struct CopySteps {
  struct Repeated {
    std::size_t copy;
    std::size_t of;
  };

  std::vector<Destination> destinations;  // on accelerators, target is the copy's number
  std::vector<std::size_t> direct;        // the destinations' copies
  std::vector<Repeated> repeated;
  std::vector<std::size_t> others;
};

// If `is_whole` of a record, its storage has its bytes or gets them, and copies are made from
// there.
CopySteps plan_copies(const std::vector<TensorCopy>& copies, const std::vector<bool>& is_whole);

}  // namespace ptsave
