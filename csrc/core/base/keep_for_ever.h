// keep_for_ever: leaks objects in forked children whose destructors would call the parent's GPU
// driver.
#pragma once

#include <utility>
#include <vector>

namespace ptsave {

// Neither destroys the value now nor when the process ends.  Not for concurrent use.
template <class T>
void keep_for_ever(T value) {
  static std::vector<T>& kept = *new std::vector<T>;
  kept.push_back(std::move(value));
}

}  // namespace ptsave
