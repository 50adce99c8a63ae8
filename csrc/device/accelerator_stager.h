// Copies accelerators' memory into pinned host memory.  It uses only interfaces of c10 and ATen
// (VirtualGuardImpl, Event, the host allocator, copy_), so one build serves every backend that
// implements them.
//
// A worker copies the pieces of its chunk into one pinned buffer, on a side stream.  That stream
// first waits for the work that the caller's stream had when the save began.  Then the worker
// checksums and writes while other workers copy.  So a copy, a checksum and a write are always in
// progress, with one buffer for each worker.  Chunks are a little smaller than 4 MiB, because
// pinned memory comes in powers of two and a chunk may need a few bytes more than it has (see
// staged_pieces()).
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/pipeline/stager.h"
#include "device/pinned_pool.h"
#include "device/side_streams.h"

namespace ptsave {

// Copies one chunk's pieces at a time, on side streams.  Small neighbours are gathered on their
// device and cross the bus together.  Keeps the storages alive.
class AcceleratorStager final : public Stager {
 public:
  // Bytes of a storage on an accelerator or in CPU memory.
  struct Source {
    c10::Storage storage;
    std::uint64_t offset = 0;
    std::uint64_t nbytes = 0;
  };
  // Payloads by record, at least one of them on an accelerator.
  using Sources = std::unordered_map<std::size_t, Source>;

  // Bounds of the host memory: at most `max_count` chunks at a time, with up to `max_nbytes` bytes
  // to stage in each.  There must not be more workers than `max_count`.
  struct Buffers {
    std::size_t max_nbytes = 0;
    std::size_t max_count = 0;
  };

  // The bytes have their values after the work now on this thread's current streams.  Without
  // `buffers` the host memory is not bounded: each chunk allocates memory for its staged bytes.
  AcceleratorStager(Sources sources, std::optional<Buffers> buffers);

  bool stages(std::size_t record) const override { return sources_.contains(record); }
  std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                      std::span<const PayloadPiece> pieces) override;

 private:
  // A piece's source and its place in the buffer.
  struct Copy;

  PinnedPool::Buffer buffer_for(std::size_t nbytes) const;
  static void copy(const PinnedPool::Buffer& buffer, std::span<const Copy> copies,
                   const at::Tensor& scratch);

  Sources sources_;
  SideStreams streams_;
  std::shared_ptr<PinnedPool> pool_;  // null without a bound
};

}  // namespace ptsave
