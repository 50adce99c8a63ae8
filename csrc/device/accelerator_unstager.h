// From pinned host memory into the memory of accelerators, with c10's and ATen's interfaces only.
//
// Side streams wait for the caller's, because memory that it has let go of may be the new
// storages'.  A buffer is used again when the copies from it are done.  The load returns when all
// copies are, so any stream may use the values; an error in one of them is raised then, after the
// others have ended.
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
// distributed on their device, where that costs next to nothing.
class AcceleratorUnstager final : public Unstager {
 public:
  // `targets` are contiguous bytes on accelerators, which stay alive as long as this.  Copies come
  // after all work that the current streams of this thread have by then, because a target may be
  // memory that this work still uses.  Leases hold `lease_nbytes`.
  AcceleratorUnstager(std::vector<at::Tensor> targets, std::size_t lease_nbytes,
                      std::size_t max_leases);
  ~AcceleratorUnstager() override;

  // How many leases are of use to `n_threads` workers, of which each holds one while it reads: one
  // more, from which copies are under way; but no more than `max_leases`, and at least one.
  static std::size_t n_leases(std::size_t n_threads, std::size_t max_leases) {
    return std::clamp<std::size_t>(max_leases, 1, 2 * std::max<std::size_t>(n_threads, 1));
  }

  std::unique_ptr<Lease> lease(std::size_t nbytes) override;
  void send(std::unique_ptr<Lease> lease, std::span<const Piece> pieces) override;
  void drain() override;

 private:
  class PinnedLease;
  // A lease, and the copies from it that may be under way.
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
