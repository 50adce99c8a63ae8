// Storages that are appended to a growing archive: their numbers, and batches of their records.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/owner.h"
#include "core/crc/crc32.h"
#include "core/memory/buffer.h"
#include "core/memory/staging_pool.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"
#include "core/statistics/statistics.h"
#include "core/write/appended_archive.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"
#include "tensors/storage.h"

namespace ptsave {

// Dead storages are removed after this many new bytes.  A dead storage still has a few bytes of
// identity beside its freed memory, so malloc cannot join that memory with its neighbours.  If
// steps allocate and free large tensors, each step would lose that memory anew.
inline constexpr std::uint64_t kMaxLateNbytes = std::uint64_t{4} << 20;

// Whether two tensors share autograd's version counter. c10 has no function for that.
inline bool are_same_counter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof a) == 0;
}

// Numbers the records of a growing archive, so that an unchanged storage is written once.
//
// A storage is recognized by its identity, its tensor's version, and its memory, size and dtype.
// So changes that torch does not count (through `.data` or NumPy) are not seen.  References to
// storages are weak: the memory may be freed, but the identity is not reused.  Not safe for
// concurrent use.
class NumberedStorages {
 public:
  // The number of a storage's record data/<number>, for an object that commit() or rollback() ends.
  std::uint32_t number(const c10::Storage& storage, const at::Tensor* tensor,
                       c10::ScalarType dtype) {
    const bool is_tracked = tensor != nullptr && !tensor->is_inference() && storage.nbytes() > 0;
    if (is_tracked) {
      const c10::VariableVersion& counter = tensor->unsafeGetTensorImpl()->version_counter();
      const auto found = known_.find(storage.unsafeGetStorageImpl());
      if (found != known_.end()) {
        const Known& known = found->second;
        if (are_same_counter(known.counter, counter) &&
            known.version == counter.current_version() && known.data == storage.data() &&
            known.nbytes == storage.nbytes() && known.dtype == dtype) {
          return known.number;
        }
      }
    }
    const std::size_t number = next_ + fresh_.storages.size();
    if (number >= std::numeric_limits<std::uint32_t>::max()) {
      throw std::length_error("an archive has at most 2^32 - 1 storages");
    }
    fresh_.storages.push_back(storage);
    if (is_tracked) {
      const c10::VariableVersion& counter = tensor->unsafeGetTensorImpl()->version_counter();
      tracked_.push_back({storage.getWeakStorageImpl(), counter, counter.current_version(),
                          storage.data(), storage.nbytes(), dtype,
                          static_cast<std::uint32_t>(number)});
    }
    return static_cast<std::uint32_t>(number);
  }

  // The object's storages that have to be written: storage i has the number first_number() + i.
  const StorageList& fresh() const { return fresh_; }
  std::uint64_t fresh_nbytes() const {
    std::uint64_t nbytes = 0;
    for (const c10::Storage& storage : fresh_.storages) nbytes += storage.nbytes();
    return nbytes;
  }
  std::uint32_t first_number() const { return next_; }

  void commit() {
    nbytes_since_removal_ += fresh_nbytes();
    if (known_.size() + tracked_.size() > max_known_ || nbytes_since_removal_ >= kMaxLateNbytes) {
      remove_dead();
    }
    for (Known& known : tracked_) {
      const c10::StorageImpl* const key = known.storage._unsafe_get_target();
      known_.insert_or_assign(key, std::move(known));
    }
    next_ += static_cast<std::uint32_t>(fresh_.storages.size());
    rollback();
  }

  void rollback() {
    tracked_.clear();
    fresh_.storages.clear();
  }
  // Forgets all storages, so that later ones are written again.
  void forget() { known_.clear(); }

 private:
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion counter;
    std::uint32_t version;
    const void* data;
    std::size_t nbytes;
    c10::ScalarType dtype;
    std::uint32_t number;
  };

  void remove_dead() {
    nbytes_since_removal_ = 0;
    std::erase_if(known_, [](const auto& item) { return item.second.storage.use_count() == 0; });
    constexpr std::size_t kMinKnown = 1024;
    max_known_ = std::max(2 * (known_.size() + tracked_.size()), kMinKnown);
  }

  std::unordered_map<const c10::StorageImpl*, Known> known_;
  StorageList fresh_;
  std::vector<Known> tracked_;  // those that can be recognized later
  std::uint32_t next_ = 0;
  std::size_t max_known_ = 1024;
  std::uint64_t nbytes_since_removal_ = 0;  // of newly known storages
};

// A pickle of a dict begins with this, in protocol 2: an empty dict, stored in the memo.  Parts
// that add entries follow, and then the STOP opcode.
inline constexpr std::string_view kDictHead{"\x80\x02}q\x00", 5};
inline constexpr char kStop = '.';

// A smaller copy is faster through the cache than past it.
inline constexpr std::size_t kMinStreamNbytes = std::size_t{64} << 10;
// A copy of at least this size is aligned to blocks in memory and in the file, so that direct
// writes take it from where it is.  The padding is less than 2 % of it.
inline constexpr std::size_t kMinInBlocksNbytes = std::size_t{256} << 10;

inline std::size_t copy_alignment(std::size_t nbytes) {
  return nbytes < kMinInBlocksNbytes ? staging_alignment(nbytes)
                                     : DirectIoAlignment::kMinBlockNbytes;
}

inline void copy_piece(std::byte* target, const std::byte* source, std::size_t nbytes) {
  if (nbytes < kMinStreamNbytes) {
    std::memcpy(target, source, nbytes);
  } else {
    stream_copy(target, source, nbytes);
  }
}

inline c10::Storage copy_on_host(const c10::Storage& storage) {
  const at::Tensor copy =
      at::empty({static_cast<std::int64_t>(storage.nbytes())}, at::TensorOptions(at::kByte));
  copy.copy_(bytes_of(storage, 0, storage.nbytes()));
  return copy.storage();
}

// Stages pieces of several groups with the groups' own stagers.
class GroupedStager final : public Stager {
 public:
  GroupedStager(const std::vector<std::unique_ptr<Stager>>& stagers, std::size_t n_records)
      : owners_(n_records, nullptr) {
    for (const auto& stager : stagers) {
      for (std::size_t i = 0; i < n_records; ++i) {
        if (stager->stages(i)) owners_[i] = stager.get();
      }
    }
  }

  bool stages(std::size_t record) const override {
    return record < owners_.size() && owners_[record] != nullptr;
  }

  std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                      std::span<const PayloadPiece> pieces) override {
    if (const std::size_t n = n_of_one_owner(pieces); n == pieces.size()) {
      return owners_[pieces.front().record]->stage(chunk, pieces);
    }
    auto joined = std::make_unique<JoinedPieces>();
    while (!pieces.empty()) {
      const std::size_t n = n_of_one_owner(pieces);
      const auto own = pieces.first(n);
      joined->add(*owners_[own.front().record]->stage(chunk, own), own);
      pieces = pieces.subspan(n);
    }
    return joined;
  }

 private:
  class JoinedPieces final : public StagedPieces {
   public:
    void add(const StagedPieces& staged, std::span<const PayloadPiece> pieces) {
      std::size_t nbytes = 0;
      for (const PayloadPiece& piece : pieces) nbytes += piece.nbytes;
      bytes_.insert(bytes_.end(), staged.data(), staged.data() + nbytes);
    }
    const std::byte* data() const override { return bytes_.data(); }

   private:
    std::vector<std::byte> bytes_;
  };

  std::size_t n_of_one_owner(std::span<const PayloadPiece> pieces) const {
    const Stager* const owner = owners_[pieces.front().record];
    const auto end = std::ranges::find_if(
        pieces, [&](const PayloadPiece& piece) { return owners_[piece.record] != owner; });
    return static_cast<std::size_t>(end - pieces.begin());
  }

  std::vector<Stager*> owners_;  // by record; null for payloads in host memory
};

// Records that are appended to an archive together, and the copies of their storages.  Copies lie
// one behind the other in slabs of one size, so that the pool can reuse returned slabs, whatever
// the sizes of the storages are.  Not safe for concurrent use.
class AppendBatch {
 public:
  // Memory is taken in units of `slab_nbytes`, at least 1.
  explicit AppendBatch(std::size_t slab_nbytes) : slab_nbytes_(slab_nbytes) {}

  // Adds the records data/<first_number>, ... With `copy`, they keep the present values; an
  // accelerator's storage is copied on this thread's current stream, without waiting.  Without
  // `copy`, the storages must not change until the batch is written.  With `element`, returns the
  // statistics of a single storage that is copied in CPU memory.  Throws std::invalid_argument for
  // a storage without memory; after an error the batch is unchanged.
  std::optional<Statistics> add(const StorageList& storages, std::uint32_t first_number, bool copy,
                                std::size_t n_threads, std::optional<Element> element = {}) {
    const std::size_t first = records_.size();
    const std::size_t first_kept = kept_.size();
    AcceleratorSources on_accelerators;
    std::vector<Piece> pieces;
    std::optional<Statistics> found;
    try {
      for (const c10::Storage& storage : storages.storages) {
        const std::size_t size = storage.nbytes();
        records_.push_back(
            {"data/" + std::to_string(first_number + (records_.size() - first)), size});
        payloads_.push_back(nullptr);
        if (size == 0) continue;
        if (storage.device().is_meta() ||
            (storage.device().is_cpu() && storage.data() == nullptr)) {
          throw std::invalid_argument("a storage without memory has no values to write");
        }
        if (SideStreams::are_supported(storage.device())) {
          kept_.push_back(copy ? copy_on_device(storage) : storage);
          if (!kept_.back().device().is_cpu()) {
            on_accelerators.emplace(records_.size() - 1, AcceleratorSource{kept_.back(), 0, size});
            kept_.pop_back();
            continue;
          }
        } else if (!storage.device().is_cpu()) {
          kept_.push_back(copy_on_host(storage));
        } else if (!copy) {
          kept_.push_back(storage);
        } else {
          std::byte* const target = reserve(size);
          if (size >= kMinInBlocksNbytes) records_.back().alignment = copy_alignment(size);
          pieces.push_back({target, static_cast<const std::byte*>(storage.data()), size});
          payloads_.back() = target;
          continue;
        }
        payloads_.back() = static_cast<const std::byte*>(kept_.back().data());
      }
      if (element && pieces.size() == 1 && storages.storages.size() == 1) {
        const Piece& piece = pieces.front();
        found = copy_with_statistics(*element, piece.target, piece.source, piece.nbytes, n_threads);
      } else {
        copy_pieces(pieces, n_threads);
      }
      if (!on_accelerators.empty()) {
        stagers_.push_back(
            std::make_unique<AcceleratorStager>(std::move(on_accelerators), std::nullopt));
      }
    } catch (...) {
      records_.resize(first);
      payloads_.resize(first);
      kept_.resize(first_kept);
      throw;
    }
    return found;
  }

  // Ends a group: the records since the previous group, and the part of a pickle that names them.
  void end_group(std::string_view part) {
    pickle_ += part;
    groups_.push_back({records_.size(), pickle_.size()});
  }

  bool is_staged() const { return !stagers_.empty(); }

  std::size_t n_groups() const { return groups_.size(); }
  // The largest number of groups, from the first on, that together have at most `nbytes` bytes.
  std::size_t n_groups_within(std::uint64_t nbytes) const {
    std::size_t n_records = 0;
    std::uint64_t total = 0;
    const auto end = std::ranges::find_if(groups_, [&](const Group& group) {
      for (; n_records < group.n_records; ++n_records) total += records_[n_records].nbytes;
      return total + group.pickle_nbytes > nbytes;
    });
    return static_cast<std::size_t>(end - groups_.begin());
  }

  // The place of a journal's parts in the file.
  struct Parts {
    std::uint64_t offset;
    std::uint64_t nbytes;
  };

  // Appends the first groups, and behind their records the record `journal_name`: the pickle of a
  // dict with the groups' parts.
  Parts write(AppendedArchive& archive, const std::string& journal_name, std::size_t n_groups,
              bool direct, WriteOptions options, const Poll& poll) {
    const Group& last = groups_.at(n_groups - 1);
    const std::size_t n = last.n_records;
    GroupedStager stager(stagers_, records_.size());
    if (is_staged()) options.stager = &stager;
    const std::string journal = pickle_.substr(0, last.pickle_nbytes) + kStop;
    std::vector<RecordSpec> records(records_.begin(),
                                    records_.begin() + static_cast<std::ptrdiff_t>(n));
    records.push_back({journal_name, journal.size()});
    const auto* const journal_bytes = reinterpret_cast<const std::byte*>(journal.data());
    archive.append(
        records, [&](std::size_t i) { return i < n ? payloads_[i] : journal_bytes; }, direct,
        options, poll);
    return {archive.payload_offset(n) + kDictHead.size(), last.pickle_nbytes - kDictHead.size()};
  }

  void release() {
    stagers_.clear();
    kept_.clear();
    slabs_.clear();
    records_.clear();
    payloads_.clear();
    groups_.clear();
  }
  // A forked child calls this instead of release(): it must not touch accelerators' memory.
  void abandon() {
    keep_for_ever(std::exchange(stagers_, {}));
    keep_for_ever(std::exchange(kept_, {}));
    release();
  }

 private:
  struct Piece {
    std::byte* target;
    const std::byte* source;
    std::size_t nbytes;
  };
  struct Group {
    std::size_t n_records;
    std::size_t pickle_nbytes;
  };

  std::byte* reserve(std::size_t nbytes) {
    const std::size_t at = align_up(slab_used_, copy_alignment(nbytes));
    if (slabs_.empty() || at > slabs_.back().nbytes || nbytes > slabs_.back().nbytes - at) {
      slabs_.push_back(StagingPool::instance().acquire({std::max(nbytes, slab_nbytes_)}).front());
      slab_used_ = nbytes;
      make_present(0, nbytes);
      return slabs_.back().data;
    }
    slab_used_ = at + nbytes;
    make_present(at, nbytes);
    return slabs_.back().data + at;
  }

  // Populates a place in the last slab if the slab is new: page faults during the copy take twice
  // as long.
  void make_present(std::size_t at, std::size_t nbytes) const {
    const StagingBlock& slab = slabs_.back();
    if (!slab.is_new || nbytes < kMinInBlocksNbytes) return;
    const auto begin = static_cast<std::size_t>(slab.data - slab.mapping->data()) + at;
    slab.mapping->populate(begin, begin + nbytes);
  }

  static void copy_pieces(const std::vector<Piece>& pieces, std::size_t n_threads) {
    std::size_t nbytes = 0;
    for (const Piece& piece : pieces) nbytes += piece.nbytes;
    if (nbytes < kMinSharedNbytes || n_threads < 2) {
      for (const Piece& piece : pieces) copy_piece(piece.target, piece.source, piece.nbytes);
      return;
    }
    // Chunks of small pieces, or parts of large ones.
    std::vector<std::vector<Piece>> chunks;
    std::size_t room = 0;
    for (Piece piece : pieces) {
      while (piece.nbytes > 0) {
        if (room == 0) {
          chunks.emplace_back();
          room = kCachePieceNbytes;
        }
        const std::size_t n = std::min(piece.nbytes, room);
        chunks.back().push_back({piece.target, piece.source, n});
        piece = {piece.target + n, piece.source + n, piece.nbytes - n};
        room -= n;
      }
    }
    share_out(chunks.size(), n_threads, [&](std::size_t i) {
      for (const Piece& piece : chunks[i]) copy_piece(piece.target, piece.source, piece.nbytes);
    });
  }

  // Copies on the caller's current stream, without waiting.  If the device has no memory for that,
  // copies to host memory, and waits.
  static c10::Storage copy_on_device(const c10::Storage& storage) {
    try {
      return bytes_of(storage, 0, storage.nbytes()).clone().storage();
    } catch (const c10::OutOfMemoryError&) {
      return copy_on_host(storage);
    }
  }

  const std::size_t slab_nbytes_;
  std::vector<StagingBlock> slabs_;
  std::size_t slab_used_ = 0;  // of the last slab
  std::vector<RecordSpec> records_;
  std::vector<const std::byte*> payloads_;
  std::vector<c10::Storage> kept_;
  std::vector<std::unique_ptr<Stager>> stagers_;
  std::string pickle_{kDictHead};
  std::vector<Group> groups_;
};

}  // namespace ptsave
