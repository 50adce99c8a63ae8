// Payloads in the memory of accelerators.
#pragma once

#include <memory>
#include <utility>

#include "core/write/payloads.h"
#include "device/accelerator_stager.h"

namespace ptsave {

class AcceleratorPayloads final : public PayloadStaging {
 public:
  explicit AcceleratorPayloads(AcceleratorStager::Sources sources) : sources_(std::move(sources)) {}

  // Limits the write's threads to the number of buffers that fit options.max_pinned_nbytes.
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override;
  std::unique_ptr<Stager> hand_over() override;
  bool is_pinned() const override { return true; }
  void abandon() override;

 private:
  AcceleratorStager::Sources sources_;
};

}  // namespace ptsave
