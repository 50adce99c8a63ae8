#include "core/read/transfer_plan.h"

#include <algorithm>
#include <stdexcept>

#include "core/memory/pages.h"

namespace ptsave {
namespace {

// Gaps between wanted records up to this size are cheaper to read than to skip.
constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{64} << 10;

// A contiguous part of the archive and its place in the mirror, both page-aligned.
struct Run {
  std::uint64_t archive_begin = 0;
  std::size_t mirror_begin = 0;
  std::size_t mirror_end = 0;
  std::size_t first_slot = 0;
};

std::vector<Run> place_records(const ArchiveIndex& index, const std::vector<WantedRecord>& records,
                               std::size_t page, TransferPlan& plan) {
  std::vector<Run> runs;
  std::uint64_t archive_end = 0;
  plan.slots.resize(records.size());
  plan.slot_by_index.assign(index.records().size(), TransferPlan::kNoSlot);
  for (std::size_t i = 0; i < records.size(); ++i) {
    const IndexedRecord& record = index.records()[records[i].index];
    const std::uint64_t begin = align_down(record.header_offset, page);
    if (runs.empty() || begin > align_up(archive_end, page) + kMaxGapNbytes) {
      const std::size_t mirror_begin = runs.empty() ? 0 : runs.back().mirror_end;
      runs.push_back({begin, mirror_begin, mirror_begin, i});
    }
    Run& run = runs.back();
    archive_end = records[i].payload_offset + record.nbytes;
    run.mirror_end = run.mirror_begin + align_up(archive_end - run.archive_begin, page);
    Slot& slot = plan.slots[i];
    slot.index = records[i].index;
    slot.header = run.mirror_begin + (record.header_offset - run.archive_begin);
    slot.payload = run.mirror_begin + (records[i].payload_offset - run.archive_begin);
    slot.end = slot.payload + record.nbytes;
    plan.slot_by_index[slot.index] = static_cast<std::uint32_t>(i);
    plan.nbytes_to_read += record.nbytes;
  }
  plan.mirror_nbytes = runs.empty() ? 0 : runs.back().mirror_end;
  return runs;
}

void cut_chunks(const std::vector<Run>& runs, TransferPlan& plan) {
  const std::vector<Slot>& slots = plan.slots;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const Run& run = runs[r];
    const std::size_t end_slot = r + 1 < runs.size() ? runs[r + 1].first_slot : slots.size();
    const std::size_t run_end = slots[end_slot - 1].end;
    std::size_t slot = run.first_slot;
    for (std::size_t begin = run.mirror_begin; begin < run_end;) {
      // Boundaries at multiples of the chunk size.
      const std::size_t end =
          std::min(run_end, align_down(begin, kMaxChunkNbytes) + kMaxChunkNbytes);
      while (slots[slot].end <= begin) ++slot;
      Chunk chunk{begin, end, run.archive_begin + (begin - run.mirror_begin), slot, slot};
      while (chunk.end_slot < end_slot && slots[chunk.end_slot].header < end) ++chunk.end_slot;
      plan.chunks.push_back(chunk);
      begin = end;
    }
  }
}

}  // namespace

std::size_t TransferPlan::slot_number(std::size_t index) const {
  if (slot_by_index.at(index) == kNoSlot) throw std::out_of_range("record is not being read");
  return slot_by_index[index];
}

std::size_t TransferPlan::chunk_at(std::size_t at) const {
  const auto next = std::ranges::upper_bound(chunks, at, {}, &Chunk::begin);
  return static_cast<std::size_t>(next - chunks.begin()) - 1;
}

TransferPlan plan_transfer(const ArchiveIndex& index, std::vector<WantedRecord> records,
                           std::size_t page) {
  if (!std::ranges::is_sorted(records, {}, &WantedRecord::payload_offset)) {
    std::ranges::sort(records, {}, &WantedRecord::payload_offset);
  }
  TransferPlan plan;
  cut_chunks(place_records(index, records, page, plan), plan);
  return plan;
}

}  // namespace ptsave
