// Memory that is freed all at once, for the containers of one function call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace ptsave {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Suitable for any type that is not over-aligned.
  void* allocate(std::size_t nbytes) {
    nbytes = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    if (nbytes > left_) {
      left_ = std::max(nbytes, kBlockNbytes);
      blocks_.push_back(std::make_unique_for_overwrite<std::byte[]>(left_));
      next_ = blocks_.back().get();
    }
    std::byte* const found = next_;
    next_ += nbytes;
    left_ -= nbytes;
    return found;
  }

 private:
  static constexpr std::size_t kAlignment = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
  static constexpr std::size_t kBlockNbytes = std::size_t{64} << 10;

  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;
};

// An allocator for the standard library's containers.  The arena must outlive them.
template <typename T>
class ArenaAllocator {
 public:
  using value_type = T;

  explicit ArenaAllocator(Arena& arena) : arena_(&arena) {}
  template <typename U>
  // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions): containers convert
  ArenaAllocator(const ArenaAllocator<U>& other) : arena_(other.arena()) {}

  T* allocate(std::size_t n) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    if (n > static_cast<std::size_t>(-1) / 2 / sizeof(T)) throw std::bad_alloc();
    return static_cast<T*>(arena_->allocate(n * sizeof(T)));
  }
  void deallocate(T* /*memory*/, std::size_t /*n*/) {}

  Arena* arena() const { return arena_; }
  template <typename U>
  bool operator==(const ArenaAllocator<U>& other) const {
    return arena_ == other.arena();
  }

 private:
  Arena* arena_;
};

}  // namespace ptsave
