#include "device/accelerator_copies.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <exception>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/base/owner.h"
#include "core/write/payloads.h"
#include "device/side_streams.h"

namespace ptsave {
namespace {

// Smaller pieces are gathered on the device.  Launching a copy takes about as long as the bus takes
// for a quarter of this size, and gathering takes almost no time beside that.
constexpr std::uint64_t kGatherNbytes = std::uint64_t{1} << 20;
constexpr std::size_t kMaxScratchNbytes = std::size_t{4} << 20;

class PinnedPieces final : public StagedPieces {
 public:
  explicit PinnedPieces(PinnedPool::Buffer buffer) : buffer_(std::move(buffer)) {}
  const std::byte* data() const override { return buffer_.data(); }

 private:
  PinnedPool::Buffer buffer_;
};

// The parts of SideStreams, with scratch memory for gathering small pieces: at most a chunk.
std::vector<SideStreams::Part> gathering_parts(const AcceleratorStager::Sources& sources,
                                               std::size_t max_nbytes) {
  std::map<c10::DeviceIndex, std::size_t> small_nbytes;
  std::vector<SideStreams::Part> parts;
  for (const auto& [record, source] : sources) {
    const c10::Device device = source.storage.device();
    if (device.is_cpu()) continue;
    const auto [known, is_new] = small_nbytes.try_emplace(device.index());
    if (is_new) parts.push_back({device});
    if (source.nbytes < kGatherNbytes) known->second += source.nbytes;
  }
  for (SideStreams::Part& part : parts) {
    part.scratch_nbytes = std::min(small_nbytes.at(part.device.index()), max_nbytes);
  }
  return parts;
}

std::size_t total_nbytes(const AcceleratorStager::Sources& sources) {
  std::size_t nbytes = 0;
  for (const auto& [record, source] : sources) nbytes += source.nbytes;
  return nbytes;
}

}  // namespace

struct AcceleratorStager::Copy {
  at::Tensor from;
  std::uint64_t at = 0;

  std::uint64_t nbytes() const { return static_cast<std::uint64_t>(from.numel()); }
  std::uint64_t end() const { return at + nbytes(); }
};

AcceleratorStager::AcceleratorStager(Sources sources, std::optional<Buffers> buffers)
    : sources_(std::move(sources)),
      streams_(gathering_parts(sources_, buffers ? buffers->max_nbytes : kMaxScratchNbytes)) {
  if (!buffers) return;
  const std::size_t nbytes = std::min(buffers->max_nbytes, total_nbytes(sources_));
  pool_ =
      std::make_shared<PinnedPool>(streams_.device(), std::bit_ceil(nbytes), buffers->max_count);
}

PinnedPool::Buffer AcceleratorStager::buffer_for(std::size_t nbytes) const {
  if (pool_ != nullptr) return pool_->acquire();
  return PinnedPool::Buffer(nullptr, pinned_storage(streams_.device(), std::bit_ceil(nbytes)));
}

std::unique_ptr<StagedPieces> AcceleratorStager::stage(std::size_t /*chunk*/,
                                                       std::span<const PayloadPiece> pieces) {
  const RawCopies raw_copies;
  const c10::DeviceGuard guard(streams_.device());
  std::vector<Copy> copies;
  std::uint64_t nbytes = 0;
  for (const PayloadPiece& piece : pieces) {
    const Source& source = sources_.at(piece.record);
    copies.push_back(
        {bytes_of(source.storage, source.offset + piece.offset, piece.nbytes), nbytes});
    nbytes += piece.nbytes;
  }
  PinnedPool::Buffer buffer = buffer_for(nbytes);
  SideStreams::Copies under_way(streams_);
  for (auto begin = copies.begin(); begin != copies.end();) {
    const c10::Device device = begin->from.device();
    const auto end =
        std::find_if(begin, copies.end(), [&](const Copy& c) { return c.from.device() != device; });
    if (!device.is_cpu()) {
      under_way.queue(device,
                      [&](const at::Tensor& scratch) { copy(buffer, {begin, end}, scratch); });
    }
    begin = end;
  }
  for (const Copy& copy : copies) {
    if (!copy.from.is_cpu()) continue;
    std::memcpy(buffer.data() + copy.at, copy.from.const_data_ptr(), copy.nbytes());
  }
  under_way.wait();
  return std::make_unique<PinnedPieces>(std::move(buffer));
}

// Copies pieces of one device, whose side stream is the current one.
void AcceleratorStager::copy(const PinnedPool::Buffer& buffer, std::span<const Copy> copies,
                             const at::Tensor& scratch) {
  const auto put = [&](const at::Tensor& from, std::uint64_t at) {
    const auto nbytes = static_cast<std::uint64_t>(from.numel());
    bytes_of(buffer.storage(), at, nbytes).copy_(from, /*non_blocking=*/true);
  };
  const std::uint64_t room = scratch.defined() ? static_cast<std::uint64_t>(scratch.numel()) : 0;
  for (std::size_t i = 0; i < copies.size();) {
    std::vector<at::Tensor> small;
    std::uint64_t nbytes = 0;
    for (std::size_t end = i; end < copies.size() && copies[end].nbytes() < kGatherNbytes &&
                              nbytes + copies[end].nbytes() <= room;
         ++end) {
      small.push_back(copies[end].from);
      nbytes += copies[end].nbytes();
    }
    if (small.size() > 1) {
      at::Tensor gathered = bytes_of(scratch, 0, nbytes);
      at::cat_out(gathered, small);
      put(gathered, copies[i].at);
      i += small.size();
    } else {
      put(copies[i].from, copies[i].at);
      ++i;
    }
  }
}

std::unique_ptr<Stager> AcceleratorPayloads::begin_write(WriteOptions& options) {
  const std::size_t nbytes = max_staged_nbytes(options.chunk_nbytes);
  const std::size_t max_buffers =
      std::max<std::size_t>(options.max_pinned_nbytes / std::bit_ceil(nbytes), 1);
  auto stager = std::make_unique<AcceleratorStager>(
      sources_, AcceleratorStager::Buffers{nbytes, max_buffers});
  options.stager = stager.get();
  options.n_threads = std::min(options.n_threads, max_buffers);  // each thread holds one buffer
  options.n_direct_threads = std::min(options.n_direct_threads, max_buffers);
  return stager;
}

std::unique_ptr<Stager> AcceleratorPayloads::hand_over() {
  return std::make_unique<AcceleratorStager>(std::exchange(sources_, {}), std::nullopt);
}

void AcceleratorPayloads::abandon() { keep_for_ever(std::exchange(sources_, {})); }

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
