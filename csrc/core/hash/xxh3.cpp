#include "core/hash/xxh3.h"

#include <cinttypes>
#include <cstdio>

// The library's own distance is too short for memory in small pages: this one takes 0.8 of the
// time.
#define XXH_PREFETCH_DIST 2048
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ptsave {
namespace {

Hash128 converted(XXH128_hash_t hash) { return {hash.low64, hash.high64}; }

}  // namespace

std::string Hash128::hex() const {
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%016" PRIx64 "%016" PRIx64, high, low);
  return digits.data();
}

Hash128 xxh3_128(const void* data, std::size_t nbytes) {
  return converted(XXH3_128bits(data, nbytes));
}

struct Xxh3Stream::State {
  XXH3_state_t state;
};

Xxh3Stream::Xxh3Stream() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->state); }

Xxh3Stream::~Xxh3Stream() = default;

void Xxh3Stream::update(const void* data, std::size_t nbytes) {
  XXH3_128bits_update(&state_->state, data, nbytes);
}

Hash128 Xxh3Stream::digest() const { return converted(XXH3_128bits_digest(&state_->state)); }

}  // namespace ptsave
