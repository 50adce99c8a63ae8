// XXH3-128, a hash of 128 bits for equality, not for security.  The xxHash library computes it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace ptsave {

struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  bool operator==(const Hash128&) const = default;
  // 32 hexadecimal digits, as the xxhsum command prints them.
  std::string hex() const;
};

Hash128 xxh3_128(const void* data, std::size_t nbytes);

// The hash of bytes that arrive in pieces.
class Xxh3Stream {
 public:
  Xxh3Stream();
  Xxh3Stream(Xxh3Stream&&) noexcept = default;
  Xxh3Stream& operator=(Xxh3Stream&&) noexcept = default;
  ~Xxh3Stream();

  void update(const void* data, std::size_t nbytes);
  Hash128 digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ptsave
