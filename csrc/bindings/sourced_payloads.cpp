#include "bindings/sourced_payloads.h"

#include <algorithm>

#include "core/buffer.h"
#include "core/error.h"
#include "core/file.h"
#include "core/staged_chunks.h"

namespace ptsave {
namespace {

struct Open {
  DirectReads direct;

  ArchiveSource operator()(const std::tuple<int, std::string>& file) const {
    const auto& [fd, name] = file;
    return {File::reopen_for_reading(fd, name), 0, direct};
  }
  ArchiveSource operator()(
      const std::tuple<std::uintptr_t, std::uint64_t, std::string>& memory) const {
    const auto& [address, nbytes, name] = memory;
    return {reinterpret_cast<const std::byte*>(address), nbytes, name};
  }
};

}  // namespace

PayloadSources::PayloadSources(const std::vector<Item>& items, bool direct) {
  const Open open{direct_reads(direct)};
  sources_.reserve(items.size());
  for (const Item& item : items) sources_.push_back(std::visit(open, item));
}

std::unique_ptr<Stager> SourcedPayloads::make_stager(WriteOptions& write) {
  // Chunks may have been made larger to suit a disk.
  const std::size_t nbytes = max_staged_nbytes(align_up(write.chunk_nbytes, kHugePageNbytes));
  const std::size_t count = std::max<std::size_t>(write.n_threads, 1);
  auto stager = std::make_unique<SourceStager>(sources_->get(), payloads_,
                                               SourceStager::Buffers{nbytes, count});
  damaged_.clear();
  write.stager = stager.get();
  if (!write.compute_crcs) return stager;
  write.check_crcs = [this](std::span<const std::uint32_t> crcs) {
    damaged_ = damaged_payloads(payloads_, crcs);
    if (!damaged_.empty()) throw FormatError("a checksum does not match", "what was read");
  };
  return stager;
}

}  // namespace ptsave
