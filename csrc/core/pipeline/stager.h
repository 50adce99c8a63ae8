// Interfaces for payloads on their way from the memory of an accelerator into host memory, or back,
// and into copies on the host.  core knows no more about accelerators; device/ implements them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace ptsave {

// A part of the payload of record `record` of a layout.
struct PayloadPiece {
  std::size_t record = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;

  bool operator==(const PayloadPiece&) const = default;
};

// Pieces in host memory, one right behind the other.  Owns that memory.
class StagedPieces {
 public:
  StagedPieces() = default;
  StagedPieces(const StagedPieces&) = delete;
  StagedPieces& operator=(const StagedPieces&) = delete;
  virtual ~StagedPieces() = default;

  virtual const std::byte* data() const = 0;
};

// Brings payloads of an archive that is being written into host memory.  Workers call it
// concurrently.
class Stager {
 public:
  Stager() = default;
  Stager(const Stager&) = delete;
  Stager& operator=(const Stager&) = delete;
  virtual ~Stager() = default;

  // Whether this is where the payload of a record has to come from.
  virtual bool stages(std::size_t record) const = 0;
  // Address of a piece that is in host memory already; null if it has to be staged.
  virtual const std::byte* in_memory(const PayloadPiece& /*piece*/) const { return nullptr; }
  // The pieces, which are all that `chunk` has of such payloads, once they are there.  Called once
  // for each chunk that has any.
  virtual std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                              std::span<const PayloadPiece> pieces) = 0;
};

// Payloads that are written while they are being copied: StagingCopy.  They are named by the memory
// of their copies; other memory is itself.  Workers call it concurrently.
class ArrivingPayloads {
 public:
  // Gets the bytes of a part, one piece after another, which are gone when it returns.
  using Use = std::function<void(std::span<const std::byte> bytes)>;

  ArrivingPayloads() = default;
  ArrivingPayloads(const ArrivingPayloads&) = delete;
  ArrivingPayloads& operator=(const ArrivingPayloads&) = delete;
  virtual ~ArrivingPayloads() = default;

  // Hands out a part of a payload, each byte once.  Throws if the copy has failed.
  virtual void read(const std::byte* copy, std::size_t nbytes, const Use& use) = 0;
  // Copies a part that will be read, too.
  virtual void peek(const std::byte* copy, std::span<std::byte> out) = 0;
};

// Host memory for a chunk whose bytes go on to accelerators.
class Lease {
 public:
  Lease() = default;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  virtual ~Lease() = default;

  virtual std::byte* data() = 0;
};

// Takes payloads of an archive that is being read to targets in accelerators' memory.  Workers call
// it concurrently.
class Unstager {
 public:
  // Bytes from `at` on in a lease, which belong `offset` bytes behind the beginning of a target.
  struct Piece {
    std::size_t target = 0;
    std::uint64_t offset = 0;
    std::size_t at = 0;
    std::size_t nbytes = 0;
  };

  Unstager() = default;
  Unstager(const Unstager&) = delete;
  Unstager& operator=(const Unstager&) = delete;
  virtual ~Unstager() = default;

  // Memory for `nbytes` bytes, at most those of a chunk.  Waits while all of the budget is under
  // way.
  virtual std::unique_ptr<Lease> lease(std::size_t nbytes) = 0;
  // Starts copying.
  virtual void send(std::unique_ptr<Lease> lease, std::span<const Piece> pieces) = 0;
  // Waits for everything that was sent, then throws the first error.
  virtual void drain() = 0;
};

}  // namespace ptsave
