#include "core/write/archive_body.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/crc/crc32.h"
#include "core/write/payloads.h"

namespace ptsave {
namespace {

constexpr std::size_t kMaxDescriptorNbytes = 24;

}  // namespace

RecordCrcs::RecordCrcs(const ArchiveLayout& layout, std::uint64_t origin, std::size_t n_chunks,
                       std::size_t chunk_nbytes)
    : layout_(layout),
      origin_(origin),
      chunk_nbytes_(chunk_nbytes),
      whole_(layout.size()),
      pieces_(n_chunks) {}

void RecordCrcs::add_piece(ChunkPipeline& pipeline, std::size_t chunk, std::size_t i,
                           std::uint32_t crc) {
  const auto [first, last] = chunks_of(layout_.record(i));
  if (first == last) {
    whole_[i] = crc;
  } else if (chunk == first) {
    pieces_[chunk].leaving = crc;
  } else {
    pieces_[chunk].entering = crc;
    publish(pipeline, chunk, kEntering);
  }
}

void RecordCrcs::complete(ChunkPipeline& pipeline, std::size_t chunk) {
  publish(pipeline, chunk, kComplete);
}

std::uint32_t RecordCrcs::record_crc(ChunkPipeline& pipeline, std::size_t chunk, std::size_t i) {
  const RecordLayout& record = layout_.record(i);
  const auto [first, last] = chunks_of(record);
  if (first == last) {
    if (first < chunk) wait_for(pipeline, first, kComplete);
    return whole_[i];
  }
  for (std::size_t c = first; c < last; ++c) wait_for(pipeline, c, kComplete);
  wait_for(pipeline, last, kEntering);
  const std::uint32_t crc = combine(record, first, last);
  // A chunk boundary may cut the descriptor; only one of both chunks records the CRC.
  if (chunk_at(record.payload_end()) == chunk) whole_[i] = crc;
  return crc;
}

std::pair<std::size_t, std::size_t> RecordCrcs::chunks_of(const RecordLayout& record) const {
  return {chunk_at(record.payload_offset), chunk_at(record.payload_end() - 1)};
}

std::uint32_t RecordCrcs::combine(const RecordLayout& record, std::size_t first,
                                  std::size_t last) const {
  std::uint32_t crc = pieces_[first].leaving;
  for (std::size_t c = first + 1; c < last; ++c) {
    crc = crc32_combine(crc, pieces_[c].entering, chunk_nbytes_);
  }
  return crc32_combine(crc, pieces_[last].entering, end_in_last_chunk(record, last));
}

void RecordCrcs::publish(ChunkPipeline& pipeline, std::size_t chunk, State state) {
  pieces_[chunk].state.store(state, std::memory_order_release);
  pipeline.notify();
}

void RecordCrcs::wait_for(ChunkPipeline& pipeline, std::size_t chunk, State state) const {
  const auto ready = [&] { return pieces_[chunk].state.load(std::memory_order_acquire) >= state; };
  if (!ready()) pipeline.wait_in_worker(ready);
}

// The staged payloads of one chunk, one directly behind the other.
class RecordsBody::StagedCursor {
 public:
  StagedCursor(const ArchiveLayout& layout, Stager* stager, std::size_t chunk, ByteRange range) {
    if (stager == nullptr) return;
    pieces_ = staged_pieces(layout, *stager, range.begin, range.end);
    if (pieces_.empty()) return;
    staged_ = stager->stage(chunk, pieces_);
    at_ = staged_->data();
  }

  // Returns the next piece if it belongs to this record, else nothing.
  std::span<const std::byte> next(std::size_t record) {
    if (done_ == pieces_.size() || pieces_[done_].record != record) return {};
    const std::size_t nbytes = pieces_[done_++].nbytes;
    return {std::exchange(at_, at_ + nbytes), nbytes};
  }

 private:
  std::vector<PayloadPiece> pieces_;
  std::unique_ptr<StagedPieces> staged_;
  std::size_t done_ = 0;
  const std::byte* at_ = nullptr;
};

RecordsBody::RecordsBody(const ArchiveLayout& layout, const Part& part, std::string front,
                         const Payloads& payloads, Stager* stager, bool compute_crcs,
                         std::size_t chunk_nbytes)
    : FileBody(part.end - part.begin, chunk_nbytes),
      layout_(layout),
      part_(part),
      front_(std::move(front)),
      payloads_(payloads),
      stager_(stager),
      compute_crcs_(compute_crcs),
      crcs_(layout, part.begin, n_chunks(), chunk_nbytes),
      lookalikes_(layout.size()) {}

void RecordsBody::produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) {
  const ByteRange relative = chunk_range(chunk);
  const ByteRange range{part_.begin + relative.begin, part_.begin + relative.end};
  StagedCursor staged(layout_, stager_, chunk, range);
  if (chunk == 0 && !front_.empty()) {
    sink.put_seam(reinterpret_cast<const std::byte*>(front_.data()), front_.size());
  }
  std::vector<std::byte> scratch;
  for (std::size_t i = layout_.first_record_after(range.begin); i < part_.n_records; ++i) {
    const RecordLayout& record = layout_.record(i);
    if (record.header_offset >= range.end) break;
    put_header(i, intersect(range, {record.header_offset, record.payload_offset}), scratch, sink);
    const ByteRange payload = intersect(range, {record.payload_offset, record.payload_end()});
    if (!payload.empty())
      crcs_.add_piece(pipeline, chunk, i, put_payload(i, payload, staged, sink));
    const ByteRange descriptor = intersect(range, {record.payload_end(), record.end()});
    if (!descriptor.empty()) {
      put_descriptor(i, crcs_.record_crc(pipeline, chunk, i), descriptor, sink);
    }
  }
  crcs_.complete(pipeline, chunk);
}

void RecordsBody::put_header(std::size_t i, ByteRange part, std::vector<std::byte>& scratch,
                             ChunkSink& sink) const {
  if (part.empty()) return;
  const RecordLayout& record = layout_.record(i);
  scratch.resize(record.payload_offset - record.header_offset);
  layout_.local_header(i, scratch.data());
  sink.put_seam(scratch.data() + (part.begin - record.header_offset), part.nbytes());
}

std::uint32_t RecordsBody::put_payload(std::size_t i, ByteRange part, StagedCursor& staged,
                                       ChunkSink& sink) {
  const RecordLayout& record = layout_.record(i);
  std::span<const std::byte> data = staged.next(i);
  if (data.empty()) {
    const std::byte* const payload = payloads_(i);
    if (payload == nullptr) {
      sink.put_hole(part.nbytes());
      return 0;
    }
    if (arriving_ != nullptr) return put_arriving(i, part, payload, sink);
    data = std::span(payload, record.nbytes).subspan(part.begin - record.payload_offset);
  }
  if (part.begin == record.payload_offset) lookalikes_[i] = descriptor_lookalike(data);
  const std::uint32_t crc = sink.put_payload(data.data(), part.nbytes(), 0);
  return compute_crcs_ ? crc : 0;
}

std::uint32_t RecordsBody::put_arriving(std::size_t i, ByteRange part, const std::byte* payload,
                                        ChunkSink& sink) {
  const RecordLayout& record = layout_.record(i);
  if (part.begin == record.payload_offset) {
    std::array<std::byte, 8> front{};  // descriptor_lookalike() looks at these
    const std::span<std::byte> seen(front.data(),
                                    std::min<std::uint64_t>(front.size(), record.nbytes));
    arriving_->peek(payload, seen);
    lookalikes_[i] = descriptor_lookalike(seen);
  }
  std::uint32_t crc = 0;
  arriving_->read(payload + (part.begin - record.payload_offset), part.nbytes(),
                  [&](std::span<const std::byte> bytes) {
                    crc = sink.put_payload(bytes.data(), bytes.size(), crc);
                  });
  return compute_crcs_ ? crc : 0;
}

void RecordsBody::put_descriptor(std::size_t i, std::uint32_t crc, ByteRange part,
                                 ChunkSink& sink) const {
  std::array<std::byte, kMaxDescriptorNbytes> descriptor{};
  layout_.data_descriptor(i, crc, descriptor.data());
  sink.put_seam(descriptor.data() + (part.begin - layout_.record(i).payload_end()), part.nbytes());
}

ArchiveBody::ArchiveBody(const ArchiveLayout& layout, const Payloads& payloads, Stager* stager,
                         bool compute_crcs, std::size_t chunk_nbytes)
    : RecordsBody(layout, {0, layout.record(layout.size() - 1).header_offset, layout.size() - 1},
                  {}, payloads, stager, compute_crcs, chunk_nbytes) {}

void ArchiveBody::prepare_tail() {
  const std::size_t last = layout().size() - 1;
  std::vector<std::string_view> names(last);
  for (std::size_t i = 0; i < last; ++i) names[i] = layout().name(i);
  names_hash_ = hash_names(names);
  tail_.resize(layout().nbytes() - nbytes());
  auto* const out = reinterpret_cast<std::byte*>(tail_.data());
  layout().local_header(last, out);
  layout().central_directory(out + (layout().central_directory_offset() - nbytes()));
}

std::string ArchiveBody::tail() {
  if (tail_.empty()) prepare_tail();
  const std::size_t last = layout().size() - 1;
  const std::span<std::uint32_t> crcs = record_crcs();
  std::vector<std::uint32_t> folded;
  for (std::size_t i = 0; i < last; ++i) {
    if (layout().record(i).nbytes == 0) continue;
    if (const auto number = lookalike(i)) folded.push_back(*number);
    folded.push_back(crcs[i]);
  }
  const std::string id = serialization_id(names_hash_, folded);
  crcs[last] = computes_crcs() ? crc32(0, id.data(), id.size()) : 0;

  auto* const out = reinterpret_cast<std::byte*>(tail_.data());
  const RecordLayout& record = layout().record(last);
  std::memcpy(out + (record.payload_offset - nbytes()), id.data(), id.size());
  layout().data_descriptor(last, crcs[last], out + (record.payload_end() - nbytes()));
  layout().set_central_crcs(crcs, out + (layout().central_directory_offset() - nbytes()));
  return std::move(tail_);
}

}  // namespace ptsave
