// Copies payloads into staging memory, from the last to the first, while a writer may take them in
// file order.  This saves time if fresh memory is expensive.  While the writer is faster, the copy
// pauses: filling expensive pages takes ten times as long as writing the same bytes.
//
// Every byte is claimed once: by the copy, or by the writer, which then reads the original. run()
// returns when the originals are no longer needed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/memory/buffer.h"
#include "core/memory/pages.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stager.h"

namespace ptsave {

class StagingCopy final : public ArrivingPayloads {
 public:
  // Returns the address of a part's original.
  using Source = std::function<const std::byte*(std::size_t part)>;
  // Returns whether a writer begins to take bytes.
  using WhenSlow = std::function<bool()>;

  explicit StagingCopy(Source source) : source_(std::move(source)) {}

  // Adds the place of a copy inside the mapping `memory`, in the file's order.
  void add(std::byte* copy, std::uint64_t nbytes, const Mapping& memory) {
    const std::uint64_t begin = this->nbytes();
    parts_.push_back({copy, begin, begin + nbytes, &memory});
  }

  // Copies the bytes that no writer takes.  Calls `when_slow` once, on this thread, when filling
  // staging memory turns out to be slower than a disk; from then on a writer may call read().  If
  // run() throws, it first waits for reads of originals to end, and later calls of read() throw.
  void run(std::size_t n_threads, const Poll& poll, const WhenSlow& when_slow) {
    const std::size_t n_units = (nbytes() + kUnitNbytes - 1) / kUnitNbytes;
    {
      const std::lock_guard lock(mutex_);
      copied_.assign(n_units, false);
      copies_begin_ = nbytes();
      changed_.notify_all();
    }
    MemoryGauge gauge;
    std::atomic<std::size_t> n_left{n_units};
    ChunkPipeline pipeline(n_units, n_units > 1 ? n_threads : 0,
                           [&](ChunkPipeline& /*self*/, std::size_t i) {
                             copy_unit(n_units - 1 - i, gauge);
                             n_left.fetch_sub(1, std::memory_order_relaxed);
                           });
    try {
      pipeline.wait_until([&] { return n_left.load() == 0 || !gauge.is_cheap(); }, poll);
      if (n_left.load() > 0) {
        race_with_writer(std::min(n_threads, n_units));
        if (!when_slow()) race_with_writer(0);
      }
      pipeline.finish(poll);
      wait_for_writer(poll);
    } catch (...) {
      fail();  // before the pipeline joins its threads, which may wait for the writer
      throw;
    }
  }

  std::uint64_t nbytes_copied() const { return nbytes_copied_.load(std::memory_order_relaxed); }

  void read(const std::byte* copy, std::size_t nbytes, const Use& use) override {
    for_each(copy, nbytes, true, use);
  }
  void peek(const std::byte* copy, std::span<std::byte> out) override {
    std::byte* to = out.data();
    for_each(copy, out.size(), false, [&](std::span<const std::byte> bytes) {
      std::memcpy(to, bytes.data(), bytes.size());
      to += bytes.size();
    });
  }
  // Ends the writer's reads, even incomplete ones.  Afterwards the copies' memory is no longer
  // used.
  void close() {
    std::unique_lock lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
    turn_.notify_all();
    changed_.wait(lock, [this] { return n_copying_ == 0; });
  }

 private:
  static constexpr std::uint64_t kUnitNbytes = kHugePageNbytes;
  static constexpr std::chrono::milliseconds kLookAround{100};
  static constexpr std::chrono::milliseconds kLookAgain{20};
  // The writer's head start for allocating buffers: with 32 MiB the copy still delayed the writer.
  static constexpr std::uint64_t kHeadStartNbytes = std::uint64_t{128} << 20;

  using Clock = std::chrono::steady_clock;
  struct Part {
    std::byte* copy;
    std::uint64_t begin;  // in the sequence of all bytes
    std::uint64_t end;
    const Mapping* memory;
  };
  // The current place of some bytes of the sequence.
  struct Found {
    std::span<const std::byte> bytes;
    bool is_original;
  };

  std::uint64_t nbytes() const { return parts_.empty() ? 0 : parts_.back().end; }
  std::size_t part_at(std::uint64_t at) const {
    const auto next = std::ranges::upper_bound(parts_, at, {}, &Part::begin);
    return static_cast<std::size_t>(next - parts_.begin()) - 1;
  }
  void race_with_writer(std::size_t n_threads) {
    const std::lock_guard lock(mutex_);
    n_racing_ = n_threads;
    race_begin_ = Clock::now();
    turn_.notify_all();
  }
  // Whether the copy is faster than the writer with its head start.  The caller holds the lock.
  bool is_worthwhile() const {
    if (n_racing_ == 0) return true;
    using Seconds = std::chrono::duration<double>;
    const Seconds writing = Clock::now() - race_begin_;
    const Seconds copying = time_copying_;
    return writing.count() * static_cast<double>(n_racing_ * nbytes_copied()) >
           copying.count() * static_cast<double>(originals_end_ + kHeadStartNbytes);
  }
  void copy_unit(std::size_t unit, MemoryGauge& gauge) {
    std::uint64_t begin = unit * kUnitNbytes;
    const std::uint64_t end = std::min(begin + kUnitNbytes, nbytes());
    {
      std::unique_lock lock(mutex_);
      const auto is_superfluous = [&] {
        return is_closed_ || state_ != State::kCopying || originals_end_ >= end;
      };
      // Do not wait if the copy has claimed an earlier unit: the writer needs copies of all units
      // from there on.
      while (!is_worthwhile() && !is_superfluous() && copies_begin_ >= end) {
        turn_.wait_for(lock, kLookAgain);
      }
      if (is_superfluous()) return;
      begin = std::max(begin, originals_end_);
      copies_begin_ = std::min(copies_begin_, begin);
      ++n_copying_;
      turn_.notify_all();
    }
    std::chrono::nanoseconds took{0};
    const auto copied = [&](bool all) {
      const std::lock_guard lock(mutex_);
      copied_[unit] = all;
      time_copying_ += took;
      --n_copying_;
      changed_.notify_all();
      if (all) return;
      state_ = State::kFailed;
      turn_.notify_all();
    };
    try {
      const auto start = thread_cpu_time();
      make_present(begin, end);
      copy_range(begin, end);
      took = thread_cpu_time() - start;
      gauge.note(end - begin, took);
    } catch (...) {
      copied(false);
      throw;
    }
    nbytes_copied_.fetch_add(end - begin, std::memory_order_relaxed);
    copied(true);
  }

  void copy_range(std::uint64_t begin, std::uint64_t end) const {
    for (std::size_t i = part_at(begin); begin < end; ++i) {
      const Part& part = parts_[i];
      const std::uint64_t done = begin - part.begin;
      const std::uint64_t nbytes = std::min(end, part.end) - begin;
      stream_copy(part.copy + done, source_(i) + done, nbytes);
      begin += nbytes;
    }
  }
  // Neighbours in one mapping, less than a page apart, are populated together.
  void make_present(std::uint64_t begin, std::uint64_t end) const {
    const std::byte* from = nullptr;
    const std::byte* to = nullptr;
    const Mapping* memory = nullptr;
    const auto populate = [&] {
      if (memory == nullptr) return;
      memory->populate(static_cast<std::size_t>(from - memory->data()),
                       static_cast<std::size_t>(to - memory->data()));
    };
    for (auto part = parts_.begin() + static_cast<std::ptrdiff_t>(part_at(begin));
         part != parts_.end() && part->begin < end; ++part) {
      const std::byte* const first = part->copy + (std::max(begin, part->begin) - part->begin);
      const std::byte* const last = part->copy + (std::min(end, part->end) - part->begin);
      if (part->memory != memory || first < to || first > to + page_nbytes()) {
        populate();
        from = first;
        memory = part->memory;
      }
      to = last;
    }
    populate();
  }

  void wait_for_writer(const Poll& poll) {
    std::unique_lock lock(mutex_);
    const auto ready = [this] {
      return is_closed_ || (n_reading_ == 0 && nbytes_read_ == originals_end_);
    };
    while (!changed_.wait_for(lock, kLookAround, ready)) {
      lock.unlock();
      poll();
      lock.lock();
    }
    state_ = State::kComplete;
  }

  void fail() noexcept {
    std::unique_lock lock(mutex_);
    state_ = State::kFailed;
    changed_.notify_all();
    turn_.notify_all();
    changed_.wait(lock, [this] { return n_reading_ == 0; });
  }
  std::optional<std::uint64_t> position_of(const std::byte* copy) {
    const auto address = [this](std::size_t part) -> const std::byte* { return parts_[part].copy; };
    const std::lock_guard lock(mutex_);
    if (by_address_.empty()) {
      by_address_.resize(parts_.size());
      std::iota(by_address_.begin(), by_address_.end(), std::size_t{0});
      std::ranges::sort(by_address_, std::less<>(), address);
    }
    const auto next = std::ranges::upper_bound(by_address_, copy, std::less<>(), address);
    if (next == by_address_.begin()) return std::nullopt;
    const Part& part = parts_[*std::prev(next)];
    const auto offset = static_cast<std::uint64_t>(copy - part.copy);
    if (offset >= part.end - part.begin) return std::nullopt;
    return part.begin + offset;
  }

  Found find(std::uint64_t at, std::size_t nbytes) {
    const std::size_t i = part_at(at);
    const Part& part = parts_[i];
    const std::uint64_t end = std::min(at + nbytes, part.end);
    const auto bytes = [&](const std::byte* data, std::uint64_t stop) {
      return std::span(data + (at - part.begin), stop - at);
    };
    const std::size_t unit = at / kUnitNbytes;
    std::unique_lock lock(mutex_);
    const auto is_copied = [&] {
      return at >= copies_begin_ && unit < copied_.size() && copied_[unit];
    };
    changed_.wait(lock,
                  [&] { return state_ != State::kCopying || at < copies_begin_ || is_copied(); });
    if (at < copies_begin_ && state_ == State::kCopying) {
      const std::byte* const original = source_(i);
      const std::uint64_t stop = std::min(end, copies_begin_);
      originals_end_ = std::max(originals_end_, stop);
      if (originals_end_ == copies_begin_) turn_.notify_all();
      ++n_reading_;
      return {bytes(original, stop), true};
    }
    if (!is_copied() || state_ == State::kFailed) {
      throw std::runtime_error("the tensors could not be copied");
    }
    return {bytes(part.copy, std::min(end, (unit + 1) * kUnitNbytes)), false};
  }

  void done_with(const Found& found, std::size_t nbytes_read) {
    if (!found.is_original) return;
    const std::lock_guard lock(mutex_);
    --n_reading_;
    nbytes_read_ += nbytes_read;
    changed_.notify_all();
  }
  void for_each(const std::byte* copy, std::size_t nbytes, bool counts, const Use& use) {
    const std::optional<std::uint64_t> position = position_of(copy);
    if (!position) {
      use({copy, nbytes});
      return;
    }
    for (std::size_t done = 0; done < nbytes;) {
      const Found found = find(*position + done, nbytes - done);
      try {
        use(found.bytes);
      } catch (...) {
        done_with(found, 0);
        throw;
      }
      done_with(found, counts ? found.bytes.size() : 0);
      done += found.bytes.size();
    }
  }

  const Source source_;
  std::vector<Part> parts_;
  std::atomic<std::uint64_t> nbytes_copied_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable turn_;         // for threads that wait to copy
  std::vector<std::size_t> by_address_;  // parts; filled when a writer needs them
  std::vector<bool> copied_;             // by unit
  std::uint64_t originals_end_ = 0;      // the writer has claimed all bytes before this
  std::uint64_t copies_begin_ = 0;       // the copy has claimed all bytes from this on
  std::uint64_t nbytes_read_ = 0;        // of the originals
  std::size_t n_reading_ = 0;
  std::size_t n_copying_ = 0;
  std::chrono::nanoseconds time_copying_{0};  // of all threads
  std::size_t n_racing_ = 0;                  // the copy's threads, once it has asked for a writer
  Clock::time_point race_begin_;
  enum class State : std::uint8_t { kCopying, kComplete, kFailed } state_ = State::kCopying;
  bool is_closed_ = false;
};

}  // namespace ptsave
