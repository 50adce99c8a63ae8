// Leaks objects in forked children whose destructors would call the parent's GPU driver.
#pragma once

#include <utility>
#include <vector>

namespace ptsave {

// Never destroys the value, not even when the process ends.  Not safe for concurrent use.
template <class T>
void keep_for_ever(T value) {
  static std::vector<T>& kept = *new std::vector<T>;
  kept.push_back(std::move(value));
}

}  // namespace ptsave
