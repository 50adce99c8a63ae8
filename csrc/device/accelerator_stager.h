// From the memory of accelerators into pinned host memory, with c10's and ATen's interfaces only
// (VirtualGuardImpl, Event, the host allocator, copy_): one build serves every backend that
// implements them.
//
// A worker that takes a chunk of the file has its pieces brought into one pinned buffer, on a side
// stream that first waits for the work that the caller's stream had when the save began.  Then it
// checksums and writes, while other workers' copies are under way: there is a copy, a checksum and
// a write at any time, and no more memory than a buffer for each worker.  Chunks are a little
// smaller than 4 MiB then, because pinned memory comes in powers of two and a chunk may need a few
// bytes more than it has (see staged_pieces()).
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

// Copies on side streams, a chunk's pieces at a time.  Small neighbours are gathered on their
// device and cross the bus together.  Keeps the storages alive.
class AcceleratorStager final : public Stager {
 public:
  // Bytes of a storage, on an accelerator or in CPU memory, which is copied beside.
  struct Source {
    c10::Storage storage;
    std::uint64_t offset = 0;
    std::uint64_t nbytes = 0;
  };
  // Payloads by record, at least one of them on an accelerator.
  using Sources = std::unordered_map<std::size_t, Source>;

  // Bounds of the host memory at a time: at most `max_count` chunks, which more workers than that
  // must not need, with up to `max_nbytes` bytes to stage in each.
  struct Buffers {
    std::size_t max_nbytes = 0;
    std::size_t max_count = 0;
  };

  // The bytes are those that the current streams of this thread will have written by then.  Without
  // `buffers` all may stay in host memory: each chunk has memory of its own, for no more than it
  // has to stage.
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
