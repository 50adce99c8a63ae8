#include "device/accelerator_stager.h"

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <utility>

#include "device/bytes.h"
#include "device/raw_copies.h"

namespace ptsave {
namespace {

// A copy takes about as long to launch as the bus takes for this much.
constexpr std::uint64_t kGatherNbytes = std::uint64_t{256} << 10;

class PinnedPieces final : public StagedPieces {
 public:
  explicit PinnedPieces(PinnedPool::Buffer buffer) : buffer_(std::move(buffer)) {}
  const std::byte* data() const override { return buffer_.data(); }

 private:
  PinnedPool::Buffer buffer_;
};

std::vector<c10::Device> devices_of(const AcceleratorStager::Sources& sources) {
  std::vector<c10::Device> devices;
  for (const auto& [record, storage] : sources) devices.push_back(storage.device());
  return devices;
}

std::size_t total_nbytes(const AcceleratorStager::Sources& sources) {
  std::size_t nbytes = 0;
  for (const auto& [record, storage] : sources) nbytes += storage.nbytes();
  return nbytes;
}

// One tensor of all the bytes; none if it is not worth it, or if the device has no room for it.
at::Tensor gather(const std::vector<at::Tensor>& small) {
  try {
    return small.size() > 1 ? at::cat(small) : at::Tensor();
  } catch (const c10::OutOfMemoryError&) {
    return {};
  }
}

}  // namespace

struct AcceleratorStager::Copy {
  at::Tensor from;
  std::uint64_t at = 0;

  std::uint64_t nbytes() const { return static_cast<std::uint64_t>(from.numel()); }
  std::uint64_t end() const { return at + nbytes(); }
};

AcceleratorStager::AcceleratorStager(Sources sources, std::optional<Buffers> buffers)
    : sources_(std::move(sources)), streams_(devices_of(sources_)) {
  if (!buffers) return;
  const std::size_t nbytes = std::min(buffers->max_nbytes, total_nbytes(sources_));
  pool_ = std::make_shared<PinnedPool>(device_type(), std::bit_ceil(nbytes), buffers->max_count);
}

c10::DeviceType AcceleratorStager::device_type() const {
  return sources_.begin()->second.device().type();
}

PinnedPool::Buffer AcceleratorStager::buffer_for(std::size_t nbytes) const {
  if (pool_ != nullptr) return pool_->acquire();
  return PinnedPool::Buffer(nullptr, pinned_storage(device_type(), std::bit_ceil(nbytes)));
}

std::unique_ptr<StagedPieces> AcceleratorStager::stage(std::size_t /*chunk*/,
                                                       std::span<const PayloadPiece> pieces) {
  const RawCopies raw_copies;
  std::vector<Copy> copies;
  std::uint64_t nbytes = 0;
  for (const PayloadPiece& piece : pieces) {
    copies.push_back({bytes_of(sources_.at(piece.record), piece.offset, piece.nbytes), nbytes});
    nbytes += piece.nbytes;
  }
  PinnedPool::Buffer buffer = buffer_for(nbytes);
  std::deque<SideStreams::Use> uses;  // in the order of the guards that they hold
  std::vector<c10::Event> events;
  try {
    for (auto begin = copies.begin(); begin != copies.end();) {
      const c10::Device device = begin->from.device();
      const auto end = std::find_if(begin, copies.end(),
                                    [&](const Copy& c) { return c.from.device() != device; });
      SideStreams::Use& use = uses.emplace_back(streams_, device);
      copy(buffer, {begin, end});
      events.push_back(use.record());
      begin = end;
    }
    for (const c10::Event& event : events) event.synchronize();
  } catch (...) {
    for (const SideStreams::Use& use : uses) use.drain();
    while (!uses.empty()) uses.pop_back();
    throw;
  }
  while (!uses.empty()) uses.pop_back();
  return std::make_unique<PinnedPieces>(std::move(buffer));
}

// Of one device; its side stream is the current one.
void AcceleratorStager::copy(const PinnedPool::Buffer& buffer, std::span<const Copy> copies) {
  const auto put = [&](const at::Tensor& from, std::uint64_t at) {
    const auto nbytes = static_cast<std::uint64_t>(from.numel());
    bytes_of(buffer.storage(), at, nbytes).copy_(from, /*non_blocking=*/true);
  };
  for (std::size_t i = 0; i < copies.size();) {
    std::vector<at::Tensor> small;
    std::size_t end = i;
    for (; end < copies.size() && copies[end].nbytes() < kGatherNbytes; ++end) {
      small.push_back(copies[end].from);
    }
    if (const at::Tensor gathered = gather(small); gathered.defined()) {
      put(gathered, copies[i].at);
      i = end;
      continue;
    }
    end = std::max(end, i + 1);
    for (; i < end; ++i) put(copies[i].from, copies[i].at);
  }
}

}  // namespace ptsave
