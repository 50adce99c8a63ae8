// Copies between accelerators' memory and pinned host memory.  They use only interfaces of c10 and
// ATen (VirtualGuardImpl, Event, the host allocator, copy_), so one build serves every backend that
// implements them.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/owner.h"
#include "core/memory/buffer.h"
#include "core/pipeline/stager.h"
#include "core/write/payloads.h"
#include "device/side_streams.h"

namespace ptsave {

// The last device for which host memory was locked, and the process that locked it.
struct LastPinned {
  std::mutex mutex;
  std::optional<std::pair<c10::Device, pid_t>> use;
};
inline LastPinned& last_pinned() {
  static auto& instance = *new LastPinned;
  return instance;
}

// Lets memory of torch's pinned allocator be lost if the device has failed.  To free a block, the
// allocator records events.  Their error would leave a destructor, which ends the process.
inline void lose_on_failure(c10::DataPtr& block) {
  static const c10::DeleterFnPtr kFreeBlock = block.get_deleter();  // a process has one allocator
  static_cast<void>(block.compare_exchange_deleter(kFreeBlock, [](void* context) {
    try {
      kFreeBlock(context);
    } catch (const std::exception&) {
      return;
    }
  }));
}

// Memory from the host allocator of a device's type.  Throws c10::Error if memory cannot be locked.
inline c10::Storage pinned_storage(c10::Device device, std::size_t nbytes) {
  {
    const std::lock_guard lock(last_pinned().mutex);
    last_pinned().use.emplace(device, ::getpid());
  }
  at::HostAllocator* const allocator = at::getHostAllocator(device.type());
  c10::DataPtr block = allocator->allocate(nbytes);
  lose_on_failure(block);
  return {c10::Storage::use_byte_size_t(), nbytes, std::move(block), allocator,
          /*resizable=*/false};
}

// Returns the host allocator's free memory to the system, if pinned_storage() has been called.
// Does nothing in a forked child: the memory is the parent's.
inline void release_pinned_memory() {
  std::optional<c10::Device> device;
  {
    const std::lock_guard lock(last_pinned().mutex);
    const auto& use = last_pinned().use;
    if (use && use->second == ::getpid()) device = use->first;
  }
  if (!device) return;
  const c10::DeviceGuard guard(*device);  // it has a context
  SideStreams::wait_for_idle_streams();   // else the allocator keeps memory that they used
  at::getHostAllocator(device->type())->empty_cache();
}

// The host memory of one transfer: page-locked, as long as the system locks more.  Safe for
// concurrent use.
class HostMemory {
 public:
  explicit HostMemory(c10::Device device) : device_(device) {}

  // No storage if the system refuses, or has refused before.  A full host, `ulimit -l`, and memory
  // that other processes lock are reasons.
  c10::Storage locked(std::size_t nbytes) {
    if (is_refused_.load(std::memory_order_relaxed)) return {};
    try {
      return pinned_storage(device_, nbytes);
    } catch (const c10::Error&) {  // an error of the device comes again at its next copy
      is_refused_.store(true, std::memory_order_relaxed);
      return {};
    }
  }
  // Copies from and to ordinary memory take longer, and keep their thread waiting.
  static c10::Storage ordinary(std::size_t nbytes) {
    auto memory = std::make_unique<Mapping>(nbytes);
    std::byte* const data = memory->data();
    used_ordinary_memory().store(true, std::memory_order_relaxed);
    return {c10::Storage::use_byte_size_t(), nbytes,
            c10::DataPtr(data, memory.release(), &unmap, c10::Device(c10::DeviceType::CPU)),
            /*allocator=*/nullptr, /*resizable=*/false};
  }

 private:
  static void unmap(void* memory) { delete static_cast<Mapping*>(memory); }

  const c10::Device device_;
  std::atomic<bool> is_refused_{false};
};

// A bounded number of equal buffers, allocated when first needed.  The host allocator keeps freed
// memory, so only a process's first save or load waits for locking.  Safe for concurrent use.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  // `nbytes` should be a power of two, because torch's allocators round up to one.  If the system
  // refuses to lock more memory, the pool has fewer buffers, but `n_needed` at least: those that
  // are missing are ordinary memory.
  PinnedPool(c10::Device device, std::size_t nbytes, std::size_t n_needed, std::size_t max_count)
      : memory_(device), nbytes_(nbytes), n_needed_(n_needed), max_count_(max_count) {}

  // A buffer that returns to its pool, if it has one.
  class Buffer {
   public:
    explicit Buffer(std::shared_ptr<PinnedPool> pool, c10::Storage storage)
        : pool_(std::move(pool)), storage_(std::move(storage)) {}
    Buffer(Buffer&& other) noexcept = default;
    Buffer& operator=(Buffer&& other) = delete;
    ~Buffer() {
      if (storage_ && pool_) pool_->release(std::move(storage_));
    }

    const c10::Storage& storage() const { return storage_; }
    std::byte* data() const { return static_cast<std::byte*>(storage_.mutable_data()); }

   private:
    std::shared_ptr<PinnedPool> pool_;
    c10::Storage storage_;
  };

  std::size_t buffer_nbytes() const { return nbytes_; }
  // Waits for a free buffer.  Throws std::bad_alloc.
  Buffer acquire() {
    for (;; wait_for(kMaxPause)) {
      if (std::unique_ptr<Buffer> buffer = try_acquire()) return std::move(*buffer);
    }
  }
  // Returns when a buffer may be free, and after this time.
  void wait_for(std::chrono::microseconds pause) {
    std::unique_lock lock(mutex_);
    released_.wait_for(lock, pause, [this] { return !free_.empty() || count_ < max_count_; });
  }
  // Null if all buffers are in use.  Throws std::bad_alloc.
  std::unique_ptr<Buffer> try_acquire() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        auto buffer = std::make_unique<Buffer>(shared_from_this(), std::move(free_.back()));
        free_.pop_back();
        return buffer;
      }
      if (count_ == max_count_) return nullptr;
      free_.reserve(count_ + 1);  // release() must not throw
      ++count_;
    }
    try {
      c10::Storage storage = memory_.locked(nbytes_);
      if (!storage && has_enough()) return nullptr;
      if (!storage) storage = HostMemory::ordinary(nbytes_);
      return std::make_unique<Buffer>(shared_from_this(), std::move(storage));
    } catch (...) {
      const std::lock_guard lock(mutex_);
      --count_;
      released_.notify_one();
      throw;
    }
  }

 private:
  void release(c10::Storage storage) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(storage));
    released_.notify_one();
  }
  // Whether a buffer that the system refuses is not needed.  The pool then stays without it.
  bool has_enough() {
    const std::lock_guard lock(mutex_);
    if (count_ <= n_needed_) return false;
    max_count_ = --count_;
    return true;
  }

  HostMemory memory_;
  const std::size_t nbytes_;
  const std::size_t n_needed_;
  std::mutex mutex_;
  std::size_t max_count_;
  std::condition_variable released_;
  std::size_t count_ = 0;
  std::vector<c10::Storage> free_;
};

// Bytes of a storage on an accelerator or in CPU memory.
struct AcceleratorSource {
  c10::Storage storage;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
};

// Payloads by record, at least one of them on an accelerator.
using AcceleratorSources = std::unordered_map<std::size_t, AcceleratorSource>;

// Smaller pieces are gathered on the device.  Launching a copy takes about as long as the bus takes
// for a quarter of this size, and gathering takes almost no time beside that.
inline constexpr std::uint64_t kGatherNbytes = std::uint64_t{1} << 20;
inline constexpr std::size_t kMaxScratchNbytes = std::size_t{4} << 20;

class PinnedPieces final : public StagedPieces {
 public:
  explicit PinnedPieces(PinnedPool::Buffer buffer) : buffer_(std::move(buffer)) {}
  const std::byte* data() const override { return buffer_.data(); }

 private:
  PinnedPool::Buffer buffer_;
};

class OrderedPieces final : public StagedPieces {
 public:
  explicit OrderedPieces(std::uint64_t nbytes)
      : bytes_(std::make_unique_for_overwrite<std::byte[]>(nbytes)) {}
  const std::byte* data() const override { return bytes_.get(); }
  std::byte* data() { return bytes_.get(); }

 private:
  std::unique_ptr<std::byte[]> bytes_;
};

// The end of the items from `begin` on that have the same device.
template <typename Iterator, typename DeviceOf>
Iterator end_of_run(Iterator begin, Iterator end, const DeviceOf& device_of) {
  const c10::Device device = device_of(*begin);
  return std::find_if(begin, end, [&](const auto& item) { return device_of(item) != device; });
}

// The parts of SideStreams, with scratch memory for gathering small pieces: at most a chunk's size.
inline std::vector<SideStreams::Part> gathering_parts(const AcceleratorSources& sources,
                                                      std::size_t max_nbytes) {
  std::map<c10::DeviceIndex, std::size_t> small_nbytes;
  std::vector<SideStreams::Part> parts;
  for (const auto& [record, source] : sources) {
    const c10::Device device = source.storage.device();
    if (device.is_cpu()) continue;
    const auto [known, is_new] = small_nbytes.try_emplace(device.index());
    if (is_new) parts.push_back({device});
    if (source.nbytes < kGatherNbytes) known->second += source.nbytes;
  }
  for (SideStreams::Part& part : parts) {
    part.scratch_nbytes = std::min(small_nbytes.at(part.device.index()), max_nbytes);
  }
  return parts;
}

inline std::size_t total_nbytes(const AcceleratorSources& sources) {
  std::size_t nbytes = 0;
  for (const auto& [record, source] : sources) nbytes += source.nbytes;
  return nbytes;
}

// Copies accelerators' memory into pinned host memory.
//
// A worker copies the pieces of its chunk into one pinned buffer, on a side stream.  That stream
// first waits for the work that the caller's stream had when the save began.  Then the worker
// checksums and writes while other workers copy.  So a copy, a checksum and a write are always in
// progress, with one buffer for each worker.  Chunks are a little smaller than 4 MiB, because
// pinned memory comes in powers of two and a chunk may need a few bytes more than it has (see
// staged_pieces()).
//
// Copies one chunk's pieces at a time, on side streams.  Small neighbours are gathered on their
// device and cross the bus together.  Keeps the storages alive.
class AcceleratorStager final : public Stager {
 public:
  // Bounds of the host memory: at most `max_count` chunks at a time, with up to `max_nbytes` bytes
  // to stage in each.  There must not be more workers than `max_count`.
  struct Buffers {
    std::size_t max_nbytes = 0;
    std::size_t max_count = 0;
  };

  // Copies the values that the bytes have after the work that is now queued on this thread's
  // current streams.  Without `buffers`, host memory is not bounded: each chunk allocates its own.
  AcceleratorStager(AcceleratorSources sources, std::optional<Buffers> buffers)
      : sources_(std::move(sources)),
        streams_(gathering_parts(sources_, buffers ? buffers->max_nbytes : kMaxScratchNbytes)) {
    if (!buffers) return;
    const std::size_t nbytes = std::min(buffers->max_nbytes, total_nbytes(sources_));
    pool_ = std::make_shared<PinnedPool>(streams_.device(), std::bit_ceil(nbytes),
                                         buffers->max_count, buffers->max_count);
  }

  bool stages(std::size_t record) const override { return sources_.contains(record); }

  std::unique_ptr<StagedPieces> stage(std::size_t /*chunk*/,
                                      std::span<const PayloadPiece> pieces) override {
    const RawCopies raw_copies;
    const c10::DeviceGuard guard(streams_.device());
    std::vector<Copy> copies;
    std::uint64_t nbytes = 0;
    for (const PayloadPiece& piece : pieces) {
      const AcceleratorSource& source = sources_.at(piece.record);
      copies.push_back(
          {bytes_of(source.storage, source.offset + piece.offset, piece.nbytes), nbytes, nbytes});
      nbytes += piece.nbytes;
    }
    const bool are_sorted = sort_alternating(copies);
    PinnedPool::Buffer buffer = buffer_for(nbytes);
    SideStreams::Copies under_way(streams_);
    for (auto begin = copies.begin(); begin != copies.end();) {
      const auto end = end_of_run(begin, copies.end(), device_of);
      if (!begin->from.is_cpu()) {
        under_way.queue(begin->from.device(),
                        [&](const at::Tensor& scratch) { copy(buffer, {begin, end}, scratch); });
      }
      begin = end;
    }
    if (!are_sorted) {
      copy_on_host(copies, buffer.data());
      under_way.wait();
      return std::make_unique<PinnedPieces>(std::move(buffer));
    }
    auto ordered = std::make_unique<OrderedPieces>(nbytes);
    copy_on_host(copies, ordered->data());
    under_way.wait();
    for (const Copy& copy : copies) {
      if (copy.from.is_cpu()) continue;
      std::memcpy(ordered->data() + copy.at, buffer.data() + copy.in_buffer, copy.nbytes());
    }
    return ordered;
  }

 private:
  // A piece's source, and its places in the chunk and in the buffer.
  struct Copy {
    at::Tensor from;
    std::uint64_t at = 0;
    std::uint64_t in_buffer = 0;

    std::uint64_t nbytes() const { return static_cast<std::uint64_t>(from.numel()); }
  };

  static c10::Device device_of(const Copy& copy) { return copy.from.device(); }
  static std::size_t n_runs(const std::vector<Copy>& copies) {
    std::size_t n = 0;
    for (auto i = copies.begin(); i != copies.end(); i = end_of_run(i, copies.end(), device_of)) {
      ++n;
    }
    return n;
  }
  // Sorts copies whose devices alternate, so that each device's small pieces lie side by side in
  // the buffer and cross the bus together.  Returns false if there is nothing to win.
  static bool sort_alternating(std::vector<Copy>& copies) {
    if (n_runs(copies) <= 2) return false;
    std::vector<Copy> sorted = copies;
    std::ranges::stable_sort(sorted, {}, [](const Copy& copy) {
      return std::pair(copy.from.is_cpu(), copy.from.device().index());
    });
    if (n_runs(copies) <= 2 * n_runs(sorted)) return false;
    std::uint64_t nbytes = 0;
    for (Copy& copy : sorted) copy.in_buffer = std::exchange(nbytes, nbytes + copy.nbytes());
    copies = std::move(sorted);
    return true;
  }
  static void copy_on_host(const std::vector<Copy>& copies, std::byte* to) {
    for (const Copy& copy : copies) {
      if (!copy.from.is_cpu()) continue;
      std::memcpy(to + copy.at, copy.from.const_data_ptr(), copy.nbytes());
    }
  }

  PinnedPool::Buffer buffer_for(std::size_t nbytes) {
    if (pool_ != nullptr) return pool_->acquire();
    c10::Storage storage = memory_.locked(std::bit_ceil(nbytes));
    return PinnedPool::Buffer(nullptr, storage ? storage : HostMemory::ordinary(nbytes));
  }
  // Copies pieces of one device, whose side stream is the current one.
  static void copy(const PinnedPool::Buffer& buffer, std::span<const Copy> copies,
                   const at::Tensor& scratch) {
    const auto put = [&](const at::Tensor& from, std::uint64_t in_buffer) {
      const auto nbytes = static_cast<std::uint64_t>(from.numel());
      bytes_of(buffer.storage(), in_buffer, nbytes).copy_(from, /*non_blocking=*/true);
    };
    const std::uint64_t room = scratch.defined() ? static_cast<std::uint64_t>(scratch.numel()) : 0;
    for (std::size_t i = 0; i < copies.size();) {
      std::vector<at::Tensor> small;
      std::uint64_t nbytes = 0;
      for (std::size_t end = i; end < copies.size() && copies[end].nbytes() < kGatherNbytes &&
                                nbytes + copies[end].nbytes() <= room;
           ++end) {
        small.push_back(copies[end].from);
        nbytes += copies[end].nbytes();
      }
      if (small.size() > 1) {
        at::Tensor gathered = bytes_of(scratch, 0, nbytes);
        at::cat_out(gathered, small);
        put(gathered, copies[i].in_buffer);
        i += small.size();
      } else {
        put(copies[i].from, copies[i].in_buffer);
        ++i;
      }
    }
  }

  AcceleratorSources sources_;
  SideStreams streams_;
  HostMemory memory_{streams_.device()};  // without a bound
  std::shared_ptr<PinnedPool> pool_;      // null without a bound
};

class AcceleratorPayloads final : public PayloadStaging {
 public:
  explicit AcceleratorPayloads(AcceleratorSources sources) : sources_(std::move(sources)) {}

  // Limits the write's threads to the number of buffers that fit options.max_pinned_nbytes.
  std::unique_ptr<Stager> begin_write(WriteOptions& options) override {
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

  std::unique_ptr<Stager> hand_over() override {
    return std::make_unique<AcceleratorStager>(std::exchange(sources_, {}), std::nullopt);
  }
  bool is_pinned() const override { return true; }
  void abandon() override { keep_for_ever(std::exchange(sources_, {})); }

 private:
  AcceleratorSources sources_;
};

// The largest gap between two pieces that cross the bus together.  The bus takes about as long for
// it as the launch of one more copy.  Pieces for other devices may lie there.
inline constexpr std::size_t kMaxGapNbytes = kGatherNbytes / 4;

// The parts of SideStreams, with scratch memory for joined pieces: at most a lease's size.
inline std::vector<SideStreams::Part> scattering_parts(const std::vector<at::Tensor>& targets,
                                                       std::size_t lease_nbytes) {
  struct Total {
    std::size_t n_targets = 0;
    std::size_t nbytes = 0;
  };
  std::map<c10::DeviceIndex, Total> totals;
  std::vector<SideStreams::Part> parts;
  for (const at::Tensor& target : targets) {
    Total& total = totals[target.device().index()];
    if (total.n_targets++ == 0) parts.push_back({target.device()});
    total.nbytes += target.nbytes() + kMaxGapNbytes;
  }
  for (SideStreams::Part& part : parts) {
    const Total& total = totals.at(part.device.index());
    if (total.n_targets > 1) part.scratch_nbytes = std::min(total.nbytes, lease_nbytes);
  }
  return parts;
}

class PinnedLease final : public Lease {
 public:
  explicit PinnedLease(PinnedPool::Buffer buffer) : buffer_(std::move(buffer)) {}

  std::byte* data() override { return buffer_.data(); }
  const c10::Storage& storage() const { return buffer_.storage(); }

 private:
  PinnedPool::Buffer buffer_;
};

// Copies pinned host memory into accelerators' memory.
//
// Side streams wait for the caller's stream, because memory that the caller has freed may belong to
// the new storages.  A buffer is reused when the copies from it are done.  The load returns when
// all copies are done, so any stream may use the values.  The first error is thrown after all
// copies have ended.
//
// Copies on side streams while the next chunks are read.  Neighbours cross the bus together and are
// distributed on their device, which costs almost nothing.
class AcceleratorUnstager final : public Unstager {
 public:
  // `targets` are contiguous bytes on accelerators; this object keeps them alive.  Copies wait for
  // the work that is now queued on this thread's current streams, because that work may still use a
  // target's memory.  Leases hold `lease_nbytes`.  Each of up to `n_threads` workers reads into one
  // while copies from another are in progress, as far as `max_pinned_nbytes` allows.
  AcceleratorUnstager(std::vector<at::Tensor> targets, std::size_t lease_nbytes,
                      std::size_t n_threads, std::size_t max_pinned_nbytes)
      : targets_(std::move(targets)), streams_(scattering_parts(targets_, lease_nbytes)) {
    const std::size_t n_leases = std::clamp<std::size_t>(max_pinned_nbytes / lease_nbytes, 1,
                                                         2 * std::max<std::size_t>(n_threads, 1));
    n_workers_ = std::min(n_threads, n_leases);
    pool_ = std::make_shared<PinnedPool>(streams_.device(), std::bit_ceil(lease_nbytes),
                                         std::max<std::size_t>(n_workers_, 1), n_leases);
  }
  ~AcceleratorUnstager() override {
    try {
      drain();
    } catch (const std::exception&) {
      return;  // a caller that needs the error has called drain()
    }
  }

  // As many of the threads as can each hold a lease while they read.
  std::size_t n_workers() const { return n_workers_; }

  std::unique_ptr<Lease> lease(std::size_t nbytes) override {
    if (nbytes > pool_->buffer_nbytes()) throw std::logic_error("a chunk larger than a lease");
    const c10::DeviceGuard guard(streams_.device());
    for (;;) {
      if (std::unique_ptr<PinnedPool::Buffer> buffer = pool_->try_acquire()) {
        return std::make_unique<PinnedLease>(std::move(*buffer));
      }
      // Another worker may send its last lease at this moment, which only retire_oldest() frees.
      if (!retire_oldest()) pool_->wait_for(kMaxPause);
    }
  }

  void send(std::unique_ptr<Lease> lease, std::span<const Piece> pieces) override {
    const RawCopies raw_copies;
    const c10::DeviceGuard guard(streams_.device());
    const c10::Storage& from = static_cast<PinnedLease&>(*lease).storage();
    const auto device_of = [&](const Piece& piece) { return targets_[piece.target].device(); };
    std::vector<Piece> by_device(pieces.begin(), pieces.end());
    std::ranges::stable_sort(by_device, {}, [&](const Piece& p) { return device_of(p).index(); });
    auto copies = std::make_unique<SideStreams::Copies>(streams_);
    for (auto begin = by_device.begin(); begin != by_device.end();) {
      const auto end = end_of_run(begin, by_device.end(), device_of);
      copies->queue(device_of(*begin),
                    [&](const at::Tensor& scratch) { copy(from, {begin, end}, scratch); });
      begin = end;
    }
    const std::lock_guard lock(mutex_);
    sent_.push_back({std::move(lease), std::move(copies)});
  }

  void drain() override {
    std::exception_ptr error;
    for (bool more = true; more;) {
      try {
        more = retire_oldest();
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  // A lease, and the copies from it that may be in progress.
  struct Sent {
    std::unique_ptr<Lease> lease;
    std::unique_ptr<SideStreams::Copies> copies;
  };

  // Waits for the oldest copies; false if there are none.
  bool retire_oldest() {
    Sent oldest;
    {
      const std::lock_guard lock(mutex_);
      if (sent_.empty()) return false;
      oldest = std::move(sent_.front());
      sent_.pop_front();
    }
    const c10::DeviceGuard guard(streams_.device());
    oldest.copies->wait();
    return true;
  }

  // Copies pieces to one device, whose side stream is the current one.
  void copy(const c10::Storage& from, std::span<const Piece> pieces, const at::Tensor& scratch) {
    const std::size_t room = scratch.defined() ? static_cast<std::size_t>(scratch.numel()) : 0;
    for (std::size_t i = 0; i < pieces.size();) {
      std::size_t end = i;
      while (end < pieces.size() && pieces[end].at + pieces[end].nbytes - pieces[i].at <= room &&
             (end == i ||
              pieces[end].at - (pieces[end - 1].at + pieces[end - 1].nbytes) <= kMaxGapNbytes)) {
        ++end;
      }
      if (end - i > 1) {
        distribute(from, pieces.subspan(i, end - i), scratch);
        i = end;
        continue;
      }
      const Piece& piece = pieces[i++];
      bytes_of(targets_[piece.target], piece.offset, piece.nbytes)
          .copy_(bytes_of(from, piece.at, piece.nbytes), /*non_blocking=*/true);
    }
  }

  void distribute(const c10::Storage& from, std::span<const Piece> pieces,
                  const at::Tensor& scratch) {
    const std::size_t begin = pieces.front().at;
    const std::size_t nbytes = pieces.back().at + pieces.back().nbytes - begin;
    const at::Tensor arrived = bytes_of(scratch, 0, nbytes);
    arrived.copy_(bytes_of(from, begin, nbytes), /*non_blocking=*/true);
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> parts;
    for (const Piece& piece : pieces) {
      to.push_back(bytes_of(targets_[piece.target], piece.offset, piece.nbytes));
      parts.push_back(bytes_of(arrived, piece.at - begin, piece.nbytes));
    }
    at::_foreach_copy_(to, parts, /*non_blocking=*/true);
  }

  std::vector<at::Tensor> targets_;
  SideStreams streams_;
  std::size_t n_workers_ = 0;
  std::shared_ptr<PinnedPool> pool_;
  std::mutex mutex_;
  std::deque<Sent> sent_;
};

}  // namespace ptsave
