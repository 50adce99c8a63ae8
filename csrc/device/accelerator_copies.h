// Copies between accelerators' memory and pinned host memory.  They use only interfaces of c10 and
// ATen (VirtualGuardImpl, Event, the host allocator, copy_), so one build serves every backend that
// implements them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/pipeline/stager.h"
#include "core/write/payloads.h"
#include "device/pinned_pool.h"
#include "device/side_streams.h"

namespace ptsave {

// Copies accelerators' memory into pinned host memory.
//
// A worker copies the pieces of its chunk into one pinned buffer, on a side stream.  That stream
// first waits for the work that the caller's stream had when the save began.  Then the worker
// checksums and writes while other workers copy.  So a copy, a checksum and a write are always in
// progress, with one buffer for each worker.  Chunks are a little smaller than 4 MiB, because
// pinned memory comes in powers of two and a chunk may need a few bytes more than it has (see
// staged_pieces()).
//
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

// Payloads in the memory of accelerators.
class AcceleratorPayloads final : public PayloadStaging {
 public:
  explicit AcceleratorPayloads(AcceleratorStager::Sources sources) : sources_(std::move(sources)) {}

  // Limits the write's threads to the number of buffers that fit options.max_pinned_nbytes.
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  std::unique_ptr<Stager> hand_over() override;
  bool is_pinned() const override { return true; }
  void abandon() override;

 private:
  AcceleratorStager::Sources sources_;
};

// Copies pinned host memory into accelerators' memory.
//
// Side streams wait for the caller's stream, because memory that the caller has freed may belong to
// the new storages.  A buffer is reused when the copies from it are done.  The load returns when
// all copies are done, so any stream may use the values.  The first error is thrown after all
// copies have ended.
//
// Copies on side streams while the next chunks are read.  Neighbours cross the bus together and are
// distributed on their device, which costs almost nothing.
class AcceleratorUnstager final : public Unstager {
 public:
  // `targets` are contiguous bytes on accelerators, which this object keeps alive.  Copies come
  // after the work now on this thread's current streams, because that work may still use a target's
  // memory.  Leases hold `lease_nbytes`.
  AcceleratorUnstager(std::vector<at::Tensor> targets, std::size_t lease_nbytes,
                      std::size_t max_leases);
  ~AcceleratorUnstager() override;

  // The useful number of leases for `n_threads` workers: each worker reads into one while copies
  // from another are in progress.  At least one, at most `max_leases`.
  static std::size_t n_leases(std::size_t n_threads, std::size_t max_leases) {
    return std::clamp<std::size_t>(max_leases, 1, 2 * std::max<std::size_t>(n_threads, 1));
  }

  std::unique_ptr<Lease> lease(std::size_t nbytes) override;
  void send(std::unique_ptr<Lease> lease, std::span<const Piece> pieces) override;
  void drain() override;

 private:
  class PinnedLease;
  // A lease, and the copies from it that may be in progress.
  struct Sent {
    std::unique_ptr<Lease> lease;
    std::unique_ptr<SideStreams::Copies> copies;
  };

  bool retire_oldest();
  void copy(const c10::Storage& from, std::span<const Piece> pieces, const at::Tensor& scratch);
  void distribute(const c10::Storage& from, std::span<const Piece> pieces,
                  const at::Tensor& scratch);

  std::vector<at::Tensor> targets_;
  SideStreams streams_;
  std::shared_ptr<PinnedPool> pool_;
  std::mutex mutex_;
  std::deque<Sent> sent_;
};

}  // namespace ptsave
