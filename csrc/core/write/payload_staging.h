// Where those payloads of a file that is being written come from which are not in host memory.
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

  // Makes the stager of one write and sets it in `options`, whose threads it may limit and whose
  // checksums it may compare.  This object must outlive it.
  virtual std::unique_ptr<Stager> begin_write(WriteOptions& options) = 0;
  // Hands everything over to a stager that keeps it as it is now.  Null for payloads that nobody
  // changes.
  virtual std::unique_ptr<Stager> hand_over() { return nullptr; }
  // Whether it needs page-locked memory.
  virtual bool is_pinned() const = 0;
  // The payloads of the last write that did not have the CRC expected of them.
  virtual std::vector<DamagedPayload> damaged() const { return {}; }
  // In a forked child: leaks whatever its parent's drivers would be called to free.
  virtual void abandon() {}
};

}  // namespace ptsave
