// Lets a new file share unchanged pieces with an older one, the base.  XFS and btrfs then store
// these pieces once, and an NFS server copies them itself.  Both files are plain and whole: one may
// be removed without the other.
//
// A piece is unchanged if it has the base's bytes, or the hash that was computed when the base was
// written.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/format/archive.h"
#include "core/hash/xxh3.h"
#include "core/io/file.h"
#include "core/io/source.h"
#include "core/write/file_body.h"

namespace ptsave {

// A piece of a payload, in whole pages of the file.
struct HashedPiece {
  ByteRange range;
  Hash128 hash;
  std::uint32_t crc;
};

// The pieces of a file, in order.
using FileHashes = std::vector<HashedPiece>;

class Sharing {
 public:
  struct Base {
    ByteSource source;                         // a file
    std::shared_ptr<const FileHashes> hashes;  // null if they are unknown
  };

  // Without a base, only the new file's hashes are computed.
  explicit Sharing(std::optional<Base> base) : base_(std::move(base)) {}

  // Plans the pieces of an archive, and finds the records that may be in the base: those with the
  // same name and size whose positions differ by whole pages.
  void plan(const ArchiveLayout& layout, std::span<const IndexedRecord> base_records);
  // Begins a write of `nbytes` bytes to an empty file, which it extends to this size.  False if
  // the file system cannot share blocks: then this object is not needed.
  bool begin(const File& target, std::uint64_t nbytes);
  // Takes the bytes of a chunk, and shares its unchanged pieces.
  class Chunk;
  // Ends a write.
  void end(const File& target);

  std::uint64_t nbytes_shared() const { return nbytes_shared_.load(); }
  // The new file's hashes, and the identity of the file that has them.
  struct Hashed {
    std::shared_ptr<const FileHashes> hashes;
    File::Identity identity;
  };
  // Nothing before the end of a write, or if the file system cannot share blocks.
  const std::optional<Hashed>& hashed() const { return hashed_; }

 private:
  // The whole pages of a record's payload.
  struct Payload {
    ByteRange range;
    std::optional<std::uint64_t> shift;  // to the place in the base, modulo 2^64
  };

  std::optional<Base> base_;
  std::vector<Payload> payloads_;  // in order
  std::mutex mutex_;
  FileHashes pieces_;  // of the present write, in any order
  std::optional<Hashed> hashed_;
  std::atomic<std::uint64_t> nbytes_shared_{0};
};

// Takes the bytes of a chunk, shares its unchanged pieces, and gathers the other bytes.  Changes of
// a payload by another thread meanwhile do no harm: each byte is copied, or its hash computed,
// once.
class Sharing::Chunk final : public ChunkSink {
 public:
  // `buffer` has room for the chunk.
  Chunk(Sharing& sharing, const File& target, ByteRange range, std::byte* buffer);

  std::uint32_t put_payload(const std::byte* data, std::size_t nbytes, std::uint32_t crc) override;
  void put_seam(const std::byte* data, std::size_t nbytes) override;
  void put_hole(std::uint64_t nbytes) override;

  // Consecutive bytes of the file that must be written.
  struct Part {
    ByteRange range;
    const std::byte* data;
  };
  // Shares the last pieces, and returns the other bytes of the chunk.
  std::vector<Part> finish();

 private:
  // The next bytes: a piece, or bytes that are never shared.
  struct Section {
    ByteRange range;
    bool is_piece;
  };

  Section next_section() const;
  std::optional<ByteRange> place_in_base() const;
  void advance();
  std::uint32_t add_bytes(const std::byte* data, std::size_t nbytes, std::uint32_t crc);
  void gather(ByteRange range);
  std::optional<HashedPiece> piece_of_base();
  const std::byte* read_base();
  void end_piece();
  void share(const HashedPiece& piece);
  void share_run();

  Sharing& sharing_;
  const File& target_;
  const ByteRange range_;
  std::uint64_t at_;                              // the next byte's position in the file
  std::byte* out_;                                // and in the buffer
  std::vector<Payload>::const_iterator payload_;  // the first that ends behind `at_`
  Section section_;
  std::optional<ByteRange> place_;  // of the section in the base
  std::optional<HashedPiece> old_;  // the base's piece at this place
  ByteRange read_{0, 0};            // of the base, at `out_`; empty as soon as `out_` moves
  bool has_changed_ = false;        // the last piece of this payload
  ByteRange run_{0, 0};             // shared pieces in a row, and their place in the base
  std::uint64_t run_place_ = 0;
  std::vector<Part> parts_;
  FileHashes pieces_;
};

}  // namespace ptsave
