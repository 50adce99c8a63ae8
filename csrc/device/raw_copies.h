// Hides copies of bytes from autograd and Python modes.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace ptsave {

// Hides this thread's copies from autograd and Python modes, so that they need no GIL.
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
