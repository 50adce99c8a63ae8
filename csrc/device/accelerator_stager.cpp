#include "device/accelerator_stager.h"

#include <ATen/ops/cat.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <utility>

#include "device/bytes.h"
#include "device/raw_copies.h"

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

}  // namespace ptsave
