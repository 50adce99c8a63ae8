// Applies Python's recursion limit to recursion in C++.
#pragma once

#include <Python.h>

namespace ptsave {

// Reserves n levels of the limit while it lives, or none if too few are left.  Needs the GIL;
// leaves no exception set.
class RecursionLevels {
 public:
  explicit RecursionLevels(int n) {
    while (n_ < n && Py_EnterRecursiveCall("") == 0) ++n_;
    if (n_ == n) return;
    PyErr_Clear();
    leave();
    too_deep_ = true;
  }
  RecursionLevels(const RecursionLevels&) = delete;
  RecursionLevels& operator=(const RecursionLevels&) = delete;
  ~RecursionLevels() { leave(); }

  bool too_deep() const { return too_deep_; }

 private:
  void leave() {
    for (; n_ > 0; --n_) Py_LeaveRecursiveCall();
  }

  int n_ = 0;
  bool too_deep_ = false;
};

}  // namespace ptsave
