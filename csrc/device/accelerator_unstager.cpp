#include "device/accelerator_unstager.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <bit>
#include <map>
#include <stdexcept>
#include <utility>

#include "device/bytes.h"
#include "device/raw_copies.h"

namespace ptsave {
namespace {

// The largest gap between two pieces that cross the bus together.
constexpr std::size_t kMaxGapNbytes = std::size_t{16} << 10;

// The parts of SideStreams, with scratch memory for joined pieces: at most a lease.
std::vector<SideStreams::Part> scattering_parts(const std::vector<at::Tensor>& targets,
                                                std::size_t lease_nbytes) {
  struct Total {
    std::size_t n_targets = 0;
    std::size_t nbytes = 0;
  };
  std::map<c10::DeviceIndex, Total> totals;
  std::vector<SideStreams::Part> parts;
  for (const at::Tensor& target : targets) {
    Total& total = totals[target.device().index()];
    if (total.n_targets++ == 0) parts.push_back({target.device()});
    total.nbytes += target.nbytes() + kMaxGapNbytes;
  }
  for (SideStreams::Part& part : parts) {
    const Total& total = totals.at(part.device.index());
    if (total.n_targets > 1) part.scratch_nbytes = std::min(total.nbytes, lease_nbytes);
  }
  return parts;
}

}  // namespace

class AcceleratorUnstager::PinnedLease final : public Lease {
 public:
  explicit PinnedLease(PinnedPool::Buffer buffer) : buffer_(std::move(buffer)) {}

  std::byte* data() override { return buffer_.data(); }
  const c10::Storage& storage() const { return buffer_.storage(); }

 private:
  PinnedPool::Buffer buffer_;
};

AcceleratorUnstager::AcceleratorUnstager(std::vector<at::Tensor> targets, std::size_t lease_nbytes,
                                         std::size_t max_leases)
    : targets_(std::move(targets)),
      streams_(scattering_parts(targets_, lease_nbytes)),
      pool_(std::make_shared<PinnedPool>(streams_.device(), std::bit_ceil(lease_nbytes),
                                         max_leases)) {}

AcceleratorUnstager::~AcceleratorUnstager() {
  try {
    drain();
  } catch (const std::exception&) {
    return;  // a caller that needs the error has called drain()
  }
}

std::unique_ptr<Lease> AcceleratorUnstager::lease(std::size_t nbytes) {
  if (nbytes > pool_->buffer_nbytes()) throw std::logic_error("a chunk larger than a lease");
  const c10::DeviceGuard guard(streams_.device());
  do {
    if (std::unique_ptr<PinnedPool::Buffer> buffer = pool_->try_acquire()) {
      return std::make_unique<PinnedLease>(std::move(*buffer));
    }
  } while (retire_oldest());
  return std::make_unique<PinnedLease>(pool_->acquire());
}

// Waits for the oldest copies; false if there are none.
bool AcceleratorUnstager::retire_oldest() {
  Sent oldest;
  {
    const std::lock_guard lock(mutex_);
    if (sent_.empty()) return false;
    oldest = std::move(sent_.front());
    sent_.pop_front();
  }
  const c10::DeviceGuard guard(streams_.device());
  oldest.copies->wait();
  return true;
}

void AcceleratorUnstager::drain() {
  std::exception_ptr error;
  for (bool more = true; more;) {
    try {
      more = retire_oldest();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

void AcceleratorUnstager::send(std::unique_ptr<Lease> lease, std::span<const Piece> pieces) {
  const RawCopies raw_copies;
  const c10::DeviceGuard guard(streams_.device());
  const c10::Storage& from = static_cast<PinnedLease&>(*lease).storage();
  auto copies = std::make_unique<SideStreams::Copies>(streams_);
  for (auto begin = pieces.begin(); begin != pieces.end();) {
    const c10::Device device = targets_[begin->target].device();
    const auto end = std::find_if(begin, pieces.end(), [&](const Piece& piece) {
      return targets_[piece.target].device() != device;
    });
    copies->queue(device, [&](const at::Tensor& scratch) { copy(from, {begin, end}, scratch); });
    begin = end;
  }
  const std::lock_guard lock(mutex_);
  sent_.push_back({std::move(lease), std::move(copies)});
}

// Copies pieces to one device, whose side stream is the current one.
void AcceleratorUnstager::copy(const c10::Storage& from, std::span<const Piece> pieces,
                               const at::Tensor& scratch) {
  const std::size_t room = scratch.defined() ? static_cast<std::size_t>(scratch.numel()) : 0;
  for (std::size_t i = 0; i < pieces.size();) {
    std::size_t end = i;
    while (end < pieces.size() && pieces[end].at + pieces[end].nbytes - pieces[i].at <= room &&
           (end == i ||
            pieces[end].at - (pieces[end - 1].at + pieces[end - 1].nbytes) <= kMaxGapNbytes)) {
      ++end;
    }
    if (end - i > 1) {
      distribute(from, pieces.subspan(i, end - i), scratch);
      i = end;
      continue;
    }
    const Piece& piece = pieces[i++];
    bytes_of(targets_[piece.target], piece.offset, piece.nbytes)
        .copy_(bytes_of(from, piece.at, piece.nbytes), /*non_blocking=*/true);
  }
}

void AcceleratorUnstager::distribute(const c10::Storage& from, std::span<const Piece> pieces,
                                     const at::Tensor& scratch) {
  const std::size_t begin = pieces.front().at;
  const std::size_t nbytes = pieces.back().at + pieces.back().nbytes - begin;
  const at::Tensor arrived = bytes_of(scratch, 0, nbytes);
  arrived.copy_(bytes_of(from, begin, nbytes), /*non_blocking=*/true);
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> parts;
  for (const Piece& piece : pieces) {
    to.push_back(bytes_of(targets_[piece.target], piece.offset, piece.nbytes));
    parts.push_back(bytes_of(arrived, piece.at - begin, piece.nbytes));
  }
  at::_foreach_copy_(to, parts, /*non_blocking=*/true);
}

}  // namespace ptsave
