#include "core/write/packed_plan.h"

#include <numeric>
#include <utility>

#include "core/write/packed_body.h"

namespace ptsave {

PackedPlan::PackedPlan(std::string header, std::vector<std::uint64_t> payload_nbytes,
                       std::unique_ptr<PayloadStaging> payloads)
    : header_(std::move(header)),
      payload_nbytes_(std::move(payload_nbytes)),
      payloads_(std::move(payloads)) {}

std::uint64_t PackedPlan::nbytes() const {
  return std::accumulate(payload_nbytes_.begin(), payload_nbytes_.end(),
                         std::uint64_t{header_.size()});
}

std::unique_ptr<Stager> PackedPlan::begin_write(WriteOptions& options) {
  return payloads_->begin_write(options);
}

std::unique_ptr<FileBody> PackedPlan::make_body(const WriteOptions& options,
                                                std::size_t chunk_nbytes) const {
  auto body = std::make_unique<PackedBody>(header_, payload_nbytes_, *options.stager,
                                           options.compute_crcs, chunk_nbytes);
  body->follow(options.arriving);
  return body;
}

}  // namespace ptsave
