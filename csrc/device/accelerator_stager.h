// From the memory of accelerators into pinned host memory, with c10's and ATen's interfaces only:
// one build serves every backend that implements them.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/stager.h"
#include "device/pinned_pool.h"
#include "device/side_streams.h"

namespace ptsave {

// Copies on side streams, a chunk's pieces at a time.  Small neighbours are gathered on their
// device and cross the bus together.  Keeps the storages alive.
class AcceleratorStager final : public Stager {
 public:
  // Payloads by record.
  using Sources = std::unordered_map<std::size_t, c10::Storage>;

  // The bytes are those that the current streams of this thread will have written by then.  Chunks
  // have up to `max_nbytes` bytes to stage; at most `max_buffers` of them are in host memory at a
  // time, which more workers than that must not need.
  AcceleratorStager(Sources sources, std::size_t max_nbytes, std::size_t max_buffers);

  bool stages(std::size_t record) const override { return sources_.contains(record); }
  std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                      std::span<const PayloadPiece> pieces) override;

 private:
  // A piece's source and its place in the buffer.
  struct Copy;

  void copy(const PinnedPool::Buffer& buffer, std::span<const Copy> copies);

  Sources sources_;
  SideStreams streams_;
  std::shared_ptr<PinnedPool> pool_;
};

}  // namespace ptsave
