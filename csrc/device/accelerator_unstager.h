// Copies pinned host memory into accelerators' memory, with interfaces of c10 and ATen only.
//
// Side streams wait for the caller's stream, because memory that the caller has freed may belong to
// the new storages.  A buffer is reused when the copies from it are done.  The load returns when
// all copies are done, so any stream may use the values.  The first error is thrown after all
// copies have ended.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/pipeline/stager.h"
#include "device/pinned_pool.h"
#include "device/side_streams.h"

namespace ptsave {

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
