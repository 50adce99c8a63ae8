// Brings the payloads of a file that are not in host memory while it is written.
#pragma once

#include <memory>
#include <vector>

#include "core/pipeline/stager.h"
#include "core/write/source_stager.h"
#include "core/write/writer.h"

namespace ptsave {

class PayloadStaging {
 public:
  PayloadStaging() = default;
  PayloadStaging(const PayloadStaging&) = delete;
  PayloadStaging& operator=(const PayloadStaging&) = delete;
  virtual ~PayloadStaging() = default;

  // Makes the stager of one write and sets it in `options`; may also limit the threads there and
  // set a check of the CRCs.  This object must outlive the stager.
  virtual std::unique_ptr<Stager> begin_write(WriteOptions& options) = 0;
  // Returns a stager that keeps the payloads' present values; null for payloads that never change.
  virtual std::unique_ptr<Stager> hand_over() { return nullptr; }
  // Whether the stager needs page-locked memory.
  virtual bool is_pinned() const = 0;
  // The payloads of the last write with a wrong CRC.
  virtual std::vector<DamagedPayload> damaged() const { return {}; }
  // In a forked child, leaks objects that the parent's driver would have to free.
  virtual void abandon() {}
};

}  // namespace ptsave
