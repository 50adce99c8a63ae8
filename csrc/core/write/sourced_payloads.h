// Payloads that are parts of other files or of memory.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/io/source.h"
#include "core/write/payload_staging.h"
#include "core/write/source_stager.h"

namespace ptsave {

// Several plans may read from the same files.
using SharedSources = std::shared_ptr<const std::vector<ByteSource>>;

class SourcedPayloads final : public PayloadStaging {
 public:
  // One payload for each record; payloads without a source come from elsewhere.
  SourcedPayloads(SharedSources sources, std::vector<SourcePayload> payloads)
      : sources_(std::move(sources)), payloads_(std::move(payloads)) {}

  // For a wrong CRC, the write throws FormatError before it is complete.
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  bool is_pinned() const override { return false; }
  std::vector<DamagedPayload> damaged() const override { return damaged_; }

 private:
  SharedSources sources_;
  std::vector<SourcePayload> payloads_;
  std::vector<DamagedPayload> damaged_;
};

}  // namespace ptsave
