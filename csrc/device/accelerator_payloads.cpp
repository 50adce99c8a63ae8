#include "device/accelerator_payloads.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <optional>

#include "core/base/owner.h"
#include "core/write/payloads.h"

namespace ptsave {

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

}  // namespace ptsave
