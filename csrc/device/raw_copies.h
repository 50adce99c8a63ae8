// Copies of bytes that nothing else is to see.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace ptsave {

// Neither autograd nor Python modes see what this thread does as long as this lives; so it needs no
// GIL.
class RawCopies {
 public:
  RawCopies()
      : no_python_(
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})) {}

 private:
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_python_;
};

}  // namespace ptsave
