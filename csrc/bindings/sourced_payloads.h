// Payloads of a file that is being written which are parts of other files, or of memory.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "core/source.h"
#include "core/source_stager.h"
#include "core/writer.h"

namespace ptsave {

// ptsave._C.PayloadSources.
class PayloadSources {
 public:
  // A descriptor, which stays the caller's, and a name; or the address and the size of memory,
  // which has to live as long as this, and a name.
  using Item = std::variant<std::tuple<int, std::string>,
                            std::tuple<std::uintptr_t, std::uint64_t, std::string>>;

  // `direct`: whether files may be read past the page cache.
  PayloadSources(const std::vector<Item>& items, bool direct);

  std::span<const ArchiveSource> get() const { return sources_; }

 private:
  std::vector<ArchiveSource> sources_;
};

// Which part of which source each payload is, and what was wrong with them.
class SourcedPayloads {
 public:
  SourcedPayloads() = default;
  // One payload for each record; those without a source come from elsewhere.
  SourcedPayloads(std::shared_ptr<PayloadSources> sources, std::vector<SourcePayload> payloads)
      : sources_(std::move(sources)), payloads_(std::move(payloads)) {}

  bool empty() const { return payloads_.empty(); }
  // What reads them, also set in `write` with the comparison of checksums: FormatError if there is
  // one that is not as expected.
  std::unique_ptr<Stager> make_stager(WriteOptions& write);
  // Of the last write.
  const std::vector<DamagedPayload>& damaged() const { return damaged_; }

 private:
  std::shared_ptr<PayloadSources> sources_;
  std::vector<SourcePayload> payloads_;
  std::vector<DamagedPayload> damaged_;
};

}  // namespace ptsave
