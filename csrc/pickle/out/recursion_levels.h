// Python's recursion limit, for recursion in C++.
#pragma once

#include <Python.h>

namespace ptsave {

// Takes n levels off the limit as long as it lives, or none if there are not so many.  Needs the
// GIL; leaves no exception behind.
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
