// Placement: the destination of a transfer's bytes, fresh memory (Region) or existing (Scatter).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/read/transfer_plan.h"

namespace ptsave {

// Workers call it concurrently, for different chunks.
class Placement {
 public:
  Placement() = default;
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;
  virtual ~Placement() = default;

  // Before a chunk's first byte.
  virtual void prepare(const Chunk& chunk) = 0;

  // The memory in which the bytes from position `at` on belong, if they can be read straight into
  // it: at most `nbytes`, and at least so many that it is worth a system call.  `slot` is the first
  // that ends behind `at`.  Empty if the bytes have to be read elsewhere.
  virtual std::span<std::byte> window(const Slot& slot, std::size_t at, std::size_t nbytes) = 0;
  // Number of bytes from `at` on to read elsewhere before asking again; at most `nbytes`.
  virtual std::size_t detour(const Slot& slot, std::size_t at, std::size_t nbytes) const = 0;

  // Bytes before the slot's payload, behind the one before.
  virtual void put_seam(const Slot& slot, std::size_t at, std::span<const std::byte> bytes) = 0;
  // A part of the slot's payload; returns `crc` continued over `bytes`.
  virtual std::uint32_t put_payload(const Slot& slot, std::size_t at,
                                    std::span<const std::byte> bytes, std::uint32_t crc) = 0;

  // After a chunk's last byte.
  virtual void finish(const Chunk& chunk) = 0;

  // The slot's local header, once all of it has been put.
  virtual std::span<const std::byte> header(const Slot& slot) const = 0;
};

}  // namespace ptsave
