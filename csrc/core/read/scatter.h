// Payloads that go to memory which exists already: the tensors of a model that is being restored,
// on the host or on accelerators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/pipeline/stager.h"
#include "core/read/placement.h"
#include "core/read/region.h"

namespace ptsave {

// A part of a record's payload and the memory it belongs in.  With a `target`, that is the target
// of this number that an Unstager has, and `place` says no more than which memory it is.
struct Destination {
  std::size_t record = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
  std::optional<std::size_t> target = std::nullopt;
};

// memory[k] as the place of the whole payload of records[k]; no destinations without memory.
// std::invalid_argument if the sizes differ.
std::vector<Destination> whole_payloads(const ArchiveIndex& index,
                                        std::span<const std::size_t> records,
                                        std::span<const std::span<std::byte>> memory);

// Bytes of a payload that no destination asks for are checksummed and dropped.  Besides the local
// headers, nothing is kept.
class Scatter final : public Placement {
 public:
  // Destinations are not empty and lie within their records' payloads; those of one record must not
  // overlap within it: std::invalid_argument.  The memory must outlive this.  `fresh`, which may be
  // null, is a region in which destinations may lie whose pages are not present yet; `unstager`,
  // for destinations with targets, has to outlive this, too.
  Scatter(std::shared_ptr<const TransferPlan> plan, const std::vector<Destination>& destinations,
          bool verify, std::shared_ptr<Region> fresh, Unstager* unstager);

  void prepare(const Chunk& chunk) override;
  std::span<std::byte> window(const Slot& slot, std::size_t at, std::size_t nbytes) override;
  std::size_t detour(const Slot& slot, std::size_t at, std::size_t nbytes) const override;
  void put_seam(const Slot& slot, std::size_t at, std::span<const std::byte> bytes) override;
  std::uint32_t put_payload(const Slot& slot, std::size_t at, std::span<const std::byte> bytes,
                            std::uint32_t crc) override;
  void finish(const Chunk& chunk) override;
  std::span<const std::byte> header(const Slot& slot) const override;

 private:
  // A destination in the mirror's coordinates.
  struct Extent {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::byte* place = nullptr;
    std::optional<std::size_t> target;
  };

  void make_present(const Chunk& chunk);
  // Address for the byte at `at`, of an extent that holds it.
  std::byte* place_in(const Extent& extent, std::size_t at) const;
  std::vector<Unstager::Piece> pieces_of(const Chunk& chunk) const;
  std::size_t slot_number(const Slot& slot) const;
  // The extents of a slot that end behind `at`.
  std::span<const Extent> extents_from(const Slot& slot, std::size_t at) const;

  std::shared_ptr<const TransferPlan> plan_;
  const bool verify_;
  const std::shared_ptr<Region> fresh_;
  Unstager* const unstager_;
  std::vector<Extent> extents_;               // in the mirror's order
  std::vector<std::uint32_t> first_extents_;  // by slot, and one past the last
  std::vector<std::size_t> header_begins_;    // by slot, and one past the last
  std::vector<std::byte> headers_;
  // By chunk: the bytes that go on to accelerators, until the chunk is complete, each as far from
  // the beginning as it is in the chunk.
  std::vector<std::unique_ptr<Lease>> leases_;
};

}  // namespace ptsave
