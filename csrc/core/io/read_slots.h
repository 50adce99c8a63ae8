// Lets at most half of a transfer's threads wait for the disk at a time.
//
// Requests that a disk has at the same time tend to end at the same time: a virtual disk answers
// when its queue is empty.  If every thread waited for it, all would then checksum and copy at
// once, and the disk would be idle (a quarter of a cold load's time on two cores).  Here the
// threads that hold a buffer and wait for a slot send the next requests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <semaphore>

namespace ptsave {

// Safe for concurrent use; must outlive its slots.
class ReadSlots {
 public:
  explicit ReadSlots(std::size_t n_threads)
      : free_(static_cast<std::ptrdiff_t>(std::max<std::size_t>(n_threads / 2, 1))) {}

  // The right to wait for the disk.
  class Slot {
   public:
    explicit Slot(ReadSlots& slots) : slots_(slots) { slots_.free_.acquire(); }
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
    ~Slot() { slots_.free_.release(); }

   private:
    ReadSlots& slots_;
  };

 private:
  std::counting_semaphore<> free_;
};

}  // namespace ptsave
