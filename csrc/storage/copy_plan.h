// Plans copies from tensors whose bytes are still in an archive into tensors that exist already:
// which are reads straight into place, and the order of the others.  A copy is a read if dtype,
// strides and conjugation agree.  The same bytes for a second tensor are copied from the first.
// Targets that overlap keep the order of their copies, unless they are the same bytes (tied
// parameters).
//
// Nothing here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/read/scatter.h"

namespace ptsave {

// target.copy_(source).  The source is a view of a record, which its place in the record's storage
// describes (holding the storage would keep its memory), or a tensor that has its values.
struct TensorCopy {
  TensorCopy(at::Tensor to, const at::Tensor& from, std::optional<std::size_t> of_record);

  // From all bytes of a record.
  TensorCopy(at::Tensor to, std::size_t of_record);

  // The source, as a view of its record's storage.
  at::Tensor source_in(const c10::Storage& storage) const;

  at::Tensor target;
  std::optional<std::size_t> record;
  at::Tensor source;  // if record is not given
  c10::ScalarType dtype;
  std::int64_t offset;  // in elements
  at::DimVector sizes;
  at::DimVector strides;
  bool conj;
  bool neg;
};

// Steps for a list of copies, whose numbers are indices into it: the destinations are read, then
// the repeated copies are made from the targets of others, then the others, in this order.
struct CopySteps {
  struct Repeated {
    std::size_t copy;
    std::size_t of;
  };

  std::vector<Destination> destinations;  // on accelerators: a copy's number is its target's
  std::vector<std::size_t> direct;        // whose targets the destinations are
  std::vector<Repeated> repeated;
  std::vector<std::size_t> others;
};

// `is_whole` says of each record whether its storage has its bytes, or gets them anyway: copies are
// made from there then.
CopySteps plan_copies(const std::vector<TensorCopy>& copies, const std::vector<bool>& is_whole);

}  // namespace ptsave
