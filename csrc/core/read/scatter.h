// Puts payloads into existing memory: the tensors of a model that is being restored, on the host or
// on accelerators.
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

// A part of a record's payload and the memory it belongs in.  With `target`, the number of an
// Unstager's target, `place` only identifies the memory.
struct Destination {
  std::size_t record = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* place = nullptr;
  std::optional<std::size_t> target = std::nullopt;
};

// Makes memory[k] the place of the whole payload of records[k]; without memory, returns no
// destinations.  Throws std::invalid_argument if the sizes differ.
std::vector<Destination> whole_payloads(const ArchiveIndex& index,
                                        std::span<const std::size_t> records,
                                        std::span<const std::span<std::byte>> memory);

// Bytes of a payload without a destination are checksummed and dropped.  Only the local headers are
// kept.
class Scatter final : public Placement {
 public:
  // Destinations are not empty and lie within their records' payloads.  Throws
  // std::invalid_argument if destinations overlap in a record.  Their memory and `unstager`, which
  // targets need, must outlive this object.  `fresh` may be null; it is a region that may hold
  // destinations whose pages are not present yet.
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
  // The address of the byte at `at` in the extent that holds it.
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
  // By chunk: the bytes that go on to accelerators, at their positions in the chunk, until the
  // chunk is complete.
  std::vector<std::unique_ptr<Lease>> leases_;
};

}  // namespace ptsave
