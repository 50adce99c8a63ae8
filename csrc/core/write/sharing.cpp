#include "core/write/sharing.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/memory/pages.h"

namespace ptsave {
namespace {

// The smallest block of a file system that can share blocks.
constexpr std::uint64_t kFilePageNbytes = 4096;
constexpr std::uint64_t kSharedPieceNbytes = std::uint64_t{64} << 10;
// Direct reads of this size are faster than of one piece, and than of a whole chunk.
constexpr std::uint64_t kReadNbytes = std::uint64_t{256} << 10;
// To share less takes longer than to write it.
constexpr std::uint64_t kMinPayloadNbytes = std::uint64_t{16} << 10;
constexpr std::uint64_t kMinFileNbytes = std::uint64_t{1} << 20;

ByteRange whole_pages(ByteRange range) {
  return {align_up(range.begin, kFilePageNbytes), align_down(range.end, kFilePageNbytes)};
}

// Reserves space, so that changed pieces are written as fast as without a base.  Shared pieces need
// none, so there may be less.
void reserve(const File& file, std::uint64_t nbytes) {
  try {
    file.preallocate(nbytes);
  } catch (const IoError& error) {
    if (error.errnum() != ENOSPC && error.errnum() != EDQUOT) throw;
    file.truncate(nbytes);
  }
}

}  // namespace

void Sharing::plan(const ArchiveLayout& layout, std::span<const IndexedRecord> base_records) {
  std::unordered_map<std::string_view, const IndexedRecord*> by_name;
  by_name.reserve(base_records.size());
  for (const IndexedRecord& each : base_records) by_name.emplace(each.name, &each);
  payloads_.clear();
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const RecordLayout& record = layout.record(i);
    const ByteRange pages = whole_pages({record.payload_offset, record.payload_end()});
    if (pages.end < pages.begin + kMinPayloadNbytes) continue;
    std::optional<std::uint64_t> shift;
    const auto found = by_name.find(layout.name(i));
    if (found != by_name.end() && found->second->nbytes == record.nbytes) {
      shift = found->second->payload_offset - record.payload_offset;
      if (*shift % kFilePageNbytes != 0) shift.reset();
    }
    payloads_.push_back({pages, shift});
  }
}

bool Sharing::begin(const File& target, std::uint64_t nbytes) {
  pieces_.clear();
  hashed_.reset();
  nbytes_shared_ = 0;
  if (nbytes < kMinFileNbytes || (base_ && base_->source.nbytes() < kSharedPieceNbytes)) {
    return false;
  }
  // One piece shows whether the file system can share; the write replaces it.
  bool is_possible = false;
  if (base_) {
    is_possible = target.share(0, base_->source.descriptor(), 0, kSharedPieceNbytes);
  } else {
    const std::vector<std::byte> piece(kSharedPieceNbytes);
    target.write_at(0, piece.data(), piece.size());
    is_possible = target.share(kSharedPieceNbytes, target.fd(), 0, kSharedPieceNbytes);
  }
  target.truncate(0);
  if (is_possible) reserve(target, nbytes);
  return is_possible;
}

void Sharing::end(const File& target) {
  if (pieces_.empty()) return;
  std::ranges::sort(pieces_, {}, [](const HashedPiece& piece) { return piece.range.begin; });
  hashed_ = {std::make_shared<const FileHashes>(std::exchange(pieces_, {})), target.identity()};
}

Sharing::Chunk::Chunk(Sharing& sharing, const File& target, ByteRange range, std::byte* buffer)
    : sharing_(sharing),
      target_(target),
      range_(range),
      at_(range.begin),
      out_(buffer),
      payload_(std::ranges::upper_bound(sharing.payloads_, range.begin, {},
                                        [](const Payload& each) { return each.range.end; })),
      section_(next_section()),
      place_(place_in_base()) {}

Sharing::Chunk::Section Sharing::Chunk::next_section() const {
  ByteRange pages{range_.end, range_.end};
  if (payload_ != sharing_.payloads_.end()) {
    const ByteRange found = whole_pages(intersect(payload_->range, range_));
    if (!found.empty() && at_ < found.end) pages = found;
  }
  if (at_ < pages.begin || pages.empty()) return {{at_, pages.begin}, false};
  // Pieces are counted from the payload's beginning, so that they stay the same if it moves.
  const std::uint64_t n_before = (at_ - payload_->range.begin) % kSharedPieceNbytes;
  return {{at_, std::min(at_ + (kSharedPieceNbytes - n_before), pages.end)}, true};
}

// Ends the present section.
void Sharing::Chunk::advance() {
  while (payload_ != sharing_.payloads_.end() && payload_->range.end <= at_) {
    ++payload_;
    has_changed_ = false;
  }
  section_ = next_section();
  place_ = place_in_base();
}

std::optional<ByteRange> Sharing::Chunk::place_in_base() const {
  if (!section_.is_piece || !payload_->shift) return std::nullopt;
  const std::uint64_t begin = section_.range.begin + *payload_->shift;
  const std::uint64_t nbytes = section_.range.nbytes();
  const std::uint64_t limit = sharing_.base_->source.nbytes();
  if (nbytes > limit || begin > limit - nbytes) return std::nullopt;
  return ByteRange{begin, begin + nbytes};
}

// The base's piece at the place of the present one: known since the base was written, or read now.
std::optional<HashedPiece> Sharing::Chunk::piece_of_base() {
  if (!place_) return std::nullopt;
  if (const FileHashes* const hashes = sharing_.base_->hashes.get(); hashes != nullptr) {
    const auto found = std::ranges::lower_bound(
        *hashes, place_->begin, {}, [](const HashedPiece& each) { return each.range.begin; });
    if (found != hashes->end() && found->range == *place_) return *found;
  }
  // If one piece of a tensor has changed, others probably have, too: to read them all would take
  // as long as to write them.
  if (has_changed_) return std::nullopt;
  try {
    const std::byte* const bytes = read_base();
    const std::uint64_t nbytes = place_->nbytes();
    return HashedPiece{*place_, xxh3_128(bytes, nbytes), crc32(0, bytes, nbytes)};
  } catch (const IoError&) {  // the new file does not need the base
    return std::nullopt;
  }
}

// Reads the base's piece, and several pieces behind it if the last one was shared, into the room
// that the present pieces need if they have changed.
const std::byte* Sharing::Chunk::read_base() {
  if (intersect(read_, *place_) != *place_) {
    const std::uint64_t end = whole_pages(intersect(payload_->range, range_)).end;
    const std::uint64_t nbytes =
        std::min(run_.end == at_ ? kReadNbytes : place_->nbytes(), end - at_);
    const ByteSource& source = sharing_.base_->source;
    read_ = {0, 0};
    // A copy that shares blocks has no pages in the cache: direct reads are three times as fast.
    if (source.may_be_cached(place_->begin, nbytes) ||
        !source.read_direct(place_->begin, out_, nbytes)) {
      source.read_at(place_->begin, out_, nbytes);
    }
    read_ = {place_->begin, place_->begin + nbytes};
  }
  return out_ + (place_->begin - read_.begin);
}

// Keeps the last bytes of the buffer, which must be written to this range.
void Sharing::Chunk::gather(ByteRange range) {
  read_ = {0, 0};
  if (!parts_.empty() && parts_.back().range.end == range.begin) {
    parts_.back().range.end = range.end;
  } else {
    parts_.push_back({range, out_ - range.nbytes()});
  }
}

std::uint32_t Sharing::Chunk::add_bytes(const std::byte* data, std::size_t nbytes,
                                        std::uint32_t crc) {
  std::memcpy(out_, data, nbytes);
  crc = crc32(crc, out_, nbytes);
  out_ += nbytes;
  at_ += nbytes;
  gather({at_ - nbytes, at_});
  return crc;
}

std::uint32_t Sharing::Chunk::put_payload(const std::byte* data, std::size_t nbytes,
                                          std::uint32_t crc) {
  for (const std::byte* const end = data + nbytes; data != end;) {
    const auto left = static_cast<std::uint64_t>(end - data);
    const std::uint64_t n = std::min(left, section_.range.end - at_);
    if (!section_.is_piece) {
      crc = add_bytes(data, n, crc);
    } else {
      if (at_ == section_.range.begin) old_ = piece_of_base();
      if (old_ && n == old_->range.nbytes() && !has_changed_ && old_->hash == xxh3_128(data, n)) {
        share({section_.range, old_->hash, old_->crc});
      } else {
        std::memcpy(out_, data, n);
        out_ += n;
        at_ += n;
        if (at_ == section_.range.end) end_piece();
      }
      if (at_ == section_.range.end) {
        crc = crc32_combine(crc, pieces_.back().crc, section_.range.nbytes());
      }
    }
    if (at_ == section_.range.end) advance();
    data += n;
  }
  return crc;
}

void Sharing::Chunk::put_seam(const std::byte* data, std::size_t nbytes) {
  add_bytes(data, nbytes, 0);
  if (at_ == section_.range.end) advance();
}

void Sharing::Chunk::put_hole(std::uint64_t nbytes) {
  const std::vector<std::byte> zeros(nbytes);
  put_seam(zeros.data(), zeros.size());
}

// Shares the piece that the buffer ends with, or keeps it there.
void Sharing::Chunk::end_piece() {
  const std::uint64_t nbytes = section_.range.nbytes();
  const std::span<const std::byte> bytes(out_ - nbytes, nbytes);
  const HashedPiece piece{section_.range, xxh3_128(bytes.data(), nbytes),
                          crc32(0, bytes.data(), nbytes)};
  if (old_ && old_->hash == piece.hash) {
    out_ -= nbytes;
    share(piece);
    return;
  }
  has_changed_ = true;
  gather(section_.range);
  pieces_.push_back(piece);
}

void Sharing::Chunk::share(const HashedPiece& piece) {
  if (run_.end != piece.range.begin || run_place_ + run_.nbytes() != place_->begin) {
    share_run();
    run_ = {piece.range.begin, piece.range.begin};
    run_place_ = place_->begin;
  }
  run_.end = at_ = piece.range.end;
  has_changed_ = false;
  pieces_.push_back(piece);
}

void Sharing::Chunk::share_run() {
  const ByteRange run = std::exchange(run_, {0, 0});
  if (run.empty()) return;
  const ByteSource& base = sharing_.base_->source;
  if (target_.share(run.begin, base.descriptor(), run_place_, run.nbytes())) {
    sharing_.nbytes_shared_ += run.nbytes();
    return;
  }
  std::vector<std::byte> bytes(run.nbytes());
  base.read_at(run_place_, bytes.data(), bytes.size());
  target_.write_at(run.begin, bytes.data(), bytes.size());
}

std::vector<Sharing::Chunk::Part> Sharing::Chunk::finish() {
  share_run();
  const std::scoped_lock lock(sharing_.mutex_);
  sharing_.pieces_.insert(sharing_.pieces_.end(), pieces_.begin(), pieces_.end());
  return std::move(parts_);
}

}  // namespace ptsave
