// The destination of a transfer's bytes: fresh memory (Region) or existing memory (Scatter).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/read/transfer_plan.h"

namespace ptsave {

// Safe for concurrent use with different chunks.
class Placement {
 public:
  Placement() = default;
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;
  virtual ~Placement() = default;

  // Called before a chunk's first byte.
  virtual void prepare(const Chunk& chunk) = 0;

  // The memory for up to `nbytes` bytes from `at` on, if reading straight into it is worth a system
  // call; else empty: use a buffer.  `slot` is the first that ends behind `at`.
  virtual std::span<std::byte> window(const Slot& slot, std::size_t at, std::size_t nbytes) = 0;
  // The number of bytes from `at` on, at most `nbytes`, to read into a buffer before asking again.
  virtual std::size_t detour(const Slot& slot, std::size_t at, std::size_t nbytes) const = 0;

  // Takes bytes between the previous payload and the slot's payload.
  virtual void put_seam(const Slot& slot, std::size_t at, std::span<const std::byte> bytes) = 0;
  // Takes a part of the slot's payload; returns `crc` continued over `bytes`.
  virtual std::uint32_t put_payload(const Slot& slot, std::size_t at,
                                    std::span<const std::byte> bytes, std::uint32_t crc) = 0;

  // Called after a chunk's last byte.
  virtual void finish(const Chunk& chunk) = 0;

  // The slot's local header, after all its bytes have been put.
  virtual std::span<const std::byte> header(const Slot& slot) const = 0;
};

}  // namespace ptsave
