// The memo: the objects that a pickle has already written, by identity.
//
// Keeps its objects alive, so that no address is reused.  Needs the GIL.
#pragma once

#include <Python.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace ptsave {

// Maps addresses to numbers by open addressing: a lookup is one cache miss.  Nothing is removed.
class AddressTable {
 public:
  AddressTable() : AddressTable(0) {}
  explicit AddressTable(std::size_t expected_size)
      : slots_(std::bit_ceil(std::max(kInitialSize, expected_size * 2))) {}

  std::optional<std::uint32_t> find(const void* address) const {
    const Slot& slot = slots_[slot_of(slots_, address)];
    return slot.address == nullptr ? std::nullopt : std::optional(slot.number);
  }

  // The number of `address`, which is not null; gives it `number` if it has none.
  std::uint32_t find_or_add(const void* address, std::uint32_t number) {
    if (size_ * 3 >= slots_.size() * 2) grow();
    Slot& slot = slots_[slot_of(slots_, address)];
    if (slot.address == nullptr) {
      slot = {address, number};
      ++size_;
    }
    return slot.number;
  }

 private:
  struct Slot {
    const void* address = nullptr;
    std::uint32_t number = 0;
  };

  static constexpr std::size_t kInitialSize = 256;  // a power of two, like all sizes

  static std::size_t slot_of(const std::vector<Slot>& slots, const void* address) {
    // Addresses are multiples of 16, many of a page's size: all bits must count.
    constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;
    const std::uint64_t hash = reinterpret_cast<std::uintptr_t>(address) * kGoldenRatio;
    const std::size_t mask = slots.size() - 1;
    std::size_t i = (hash >> 32U) & mask;
    while (slots[i].address != nullptr && slots[i].address != address) i = (i + 1) & mask;
    return i;
  }

  void grow() {
    std::vector<Slot> slots(slots_.size() * 2);
    for (const Slot& slot : slots_) {
      if (slot.address != nullptr) slots[slot_of(slots, slot.address)] = slot;
    }
    slots_.swap(slots);
  }

  std::vector<Slot> slots_;
  std::size_t size_ = 0;
};

class PickleMemo {
 public:
  static constexpr std::size_t kMaxSize = std::numeric_limits<std::uint32_t>::max();

  PickleMemo() = default;
  PickleMemo(const PickleMemo&) = delete;
  PickleMemo& operator=(const PickleMemo&) = delete;
  ~PickleMemo() {
    for (PyObject* object : objects_) Py_DECREF(object);
  }

  bool full() const { return size_ == kMaxSize; }

  std::optional<std::uint32_t> find(PyObject* object) const { return table_.find(object); }

  // Adds an object that is not in the memo, and returns its number.
  std::uint32_t add(PyObject* object) {
    objects_.push_back(object);
    Py_INCREF(object);
    table_.find_or_add(object, size_);
    return size_++;
  }

  // Takes a number for an object that Python's pickler would have made internally.  No other
  // reference to it can exist, so the object itself is not made.
  std::uint32_t add_unreachable() { return size_++; }

 private:
  AddressTable table_;
  std::vector<PyObject*> objects_;
  std::uint32_t size_ = 0;
};

}  // namespace ptsave
