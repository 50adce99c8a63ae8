// The plan of a file of a header and payloads, like a safetensors file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/write/file_plan.h"

namespace ptsave {

class PackedPlan final : public FilePlan {
 public:
  // `payloads` brings all payloads, of these sizes.
  PackedPlan(std::string header, std::vector<std::uint64_t> payload_nbytes,
             std::unique_ptr<PayloadStaging> payloads);

  std::uint64_t nbytes() const override;
  bool is_pinned() const override { return payloads_->is_pinned(); }
  std::vector<DamagedPayload> damaged() const override { return payloads_->damaged(); }

 protected:
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  std::unique_ptr<FileBody> make_body(const WriteOptions& options,
                                      std::size_t chunk_nbytes) const override;

 private:
  std::string header_;
  std::vector<std::uint64_t> payload_nbytes_;
  std::unique_ptr<PayloadStaging> payloads_;
};

}  // namespace ptsave
