#include "core/io/range_read.h"

#include <algorithm>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>

namespace ptsave {
namespace {

void refuse_overlaps(std::span<const FileRange> ranges) {
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    const FileRange& before = ranges[i - 1];
    if (before.file == ranges[i].file && before.offset + before.nbytes > ranges[i].offset) {
      throw std::invalid_argument("ranges of a file overlap");
    }
  }
}

}  // namespace

RangeRead::RangeRead(std::shared_ptr<RangeFiles> files, std::vector<FileRange> ranges,
                     std::uint64_t max_gap)
    : files_(std::move(files)), ranges_(files_->sources(), std::move(ranges), max_gap) {
  refuse_overlaps(ranges_.ranges());
}

void RangeRead::read(std::size_t stretch, Unstager* unstager) const {
  BufferPool& buffers = files_->buffers();
  ReadSlots& slots = files_->slots();
  if (unstager == nullptr) return ranges_.read(stretch, buffers, nullptr, &slots);
  const std::vector<Unstager::Piece> pieces = ranges_.pieces_to_send(stretch);
  if (pieces.empty()) return ranges_.read(stretch, buffers, nullptr, &slots);
  std::unique_ptr<Lease> lease = unstager->lease(ranges_.stretch_nbytes(stretch));
  ranges_.read(stretch, buffers, lease->data(), &slots);
  unstager->send(std::move(lease), pieces);
}

void RangeRead::run(std::size_t n_threads, const Poll& poll, Unstager* unstager) {
  std::uint64_t nbytes = 0;
  for (std::size_t i = 0; i < ranges_.n_stretches(); ++i) nbytes += ranges_.stretch_nbytes(i);
  n_threads = nbytes < kThreadedNbytes ? 0 : std::min(n_threads, ranges_.n_stretches());
  ChunkPipeline pipeline(ranges_.n_stretches(), n_threads, [&](ChunkPipeline&, std::size_t i) {
    read(i, unstager);
    nbytes_read_.fetch_add(ranges_.stretch_nbytes(i), std::memory_order_relaxed);
  });
  pipeline.finish(poll);
  if (unstager != nullptr) unstager->drain();
}

}  // namespace ptsave
