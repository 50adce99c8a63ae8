// Interfaces for moving payloads between accelerators and host memory, and into copies on the host.
// core uses accelerators only through these interfaces, which device/ implements.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "core/base/owner.h"

namespace ptsave {

// A part of the payload of record `record` of a layout.
struct PayloadPiece {
  std::size_t record = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;

  bool operator==(const PayloadPiece&) const = default;
};

// Owns pieces in host memory, one directly behind the other.
class StagedPieces : public Interface {
 public:
  virtual const std::byte* data() const = 0;
};

// Brings payloads into host memory while their archive is written.  Safe for concurrent use.
class Stager : public Interface {
 public:
  // Whether the stager brings the record's payload.
  virtual bool stages(std::size_t record) const = 0;
  // The address of a piece that is already in host memory; null if it has to be staged.
  virtual const std::byte* in_memory(const PayloadPiece& /*piece*/) const { return nullptr; }
  // Brings the pieces, which are all staged pieces of `chunk`, and waits for them.  Called once for
  // each chunk with such pieces.
  virtual std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                              std::span<const PayloadPiece> pieces) = 0;
};

// Payloads that are written while they are being copied: StagingCopy.  A payload is identified by
// its copy's address; bytes at any other address are read from there.  Safe for concurrent use.
class ArrivingPayloads : public Interface {
 public:
  // Receives a part piece by piece; a piece is valid only during the call.
  using Use = std::function<void(std::span<const std::byte> bytes)>;

  // Passes a part of a payload to `use`, each byte once.  Throws if the copy has failed.
  virtual void read(const std::byte* copy, std::size_t nbytes, const Use& use) = 0;
  // Copies a part of a payload. read() may be called for that part later.
  virtual void peek(const std::byte* copy, std::span<std::byte> out) = 0;
};

// Host memory for a chunk whose bytes go on to accelerators.
class Lease : public Interface {
 public:
  virtual std::byte* data() = 0;
};

// Whether a transfer went through ordinary memory, because the system refused to lock more, and no
// warning has said so yet.
inline std::atomic<bool>& used_ordinary_memory() {
  static std::atomic<bool> instance{false};
  return instance;
}

// Takes payloads to targets on accelerators while their archive is read.  Safe for concurrent use.
class Unstager : public Interface {
 public:
  // Bytes at position `at` of a lease, which belong at `offset` in a target.
  struct Piece {
    std::size_t target = 0;
    std::uint64_t offset = 0;
    std::size_t at = 0;
    std::size_t nbytes = 0;
  };

  // Memory for `nbytes` bytes, at most a chunk's.  Waits while the whole budget is in use.
  virtual std::unique_ptr<Lease> lease(std::size_t nbytes) = 0;
  // Starts copying to the targets.
  virtual void send(std::unique_ptr<Lease> lease, std::span<const Piece> pieces) = 0;
  // Waits for all copies, then throws the first error.
  virtual void drain() = 0;
};

}  // namespace ptsave
