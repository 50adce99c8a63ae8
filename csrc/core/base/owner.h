// Base classes for interfaces and for owners of memory, and values that are never destroyed.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

namespace ptsave {

// The base class of interfaces.  Their objects cannot be copied or moved.
class Interface {
 public:
  Interface() = default;
  Interface(const Interface&) = delete;
  Interface& operator=(const Interface&) = delete;
  virtual ~Interface() = default;
};

// Owns loaded memory.  The object counts its own references, so a reference is one pointer, which
// fits into a torch storage.  A std::shared_ptr would need extra memory for each storage.
class Owner {
 public:
  void retain() noexcept { n_references_.fetch_add(1, std::memory_order_relaxed); }
  void release() noexcept {
    if (n_references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 protected:
  virtual ~Owner() = default;

 private:
  std::atomic<std::size_t> n_references_{1};  // the creator's
};

// One reference to an owner, or none.
class OwnerReference {
 public:
  OwnerReference() = default;
  // Takes over the creator's reference.
  explicit OwnerReference(Owner* owner) : owner_(owner) {}
  OwnerReference(OwnerReference&& other) noexcept : owner_(other.detach()) {}
  OwnerReference(const OwnerReference& other) : owner_(other.owner_) {
    if (owner_ != nullptr) owner_->retain();
  }
  OwnerReference& operator=(OwnerReference other) noexcept {
    std::swap(owner_, other.owner_);
    return *this;
  }
  ~OwnerReference() {
    if (owner_ != nullptr) owner_->release();
  }

  // Returns the pointer.  The caller must release the reference.
  Owner* detach() { return std::exchange(owner_, nullptr); }

 private:
  Owner* owner_ = nullptr;
};

// Keeps a value and never runs its destructor, not even when the process ends.  Used in forked
// children, where the destructor would call the parent's GPU driver.  Not safe for concurrent use.
template <class T>
void keep_for_ever(T value) {
  static std::vector<T>& kept = *new std::vector<T>;
  kept.push_back(std::move(value));
}

}  // namespace ptsave
