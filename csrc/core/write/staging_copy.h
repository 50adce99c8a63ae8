// Copies payloads into staging memory, from the last to the first, while a writer may take them in
// file order.  This saves time if fresh memory is expensive.  While the writer is faster, the copy
// pauses: expensive pages cost ten times as long as the writer takes for the same bytes.
//
// Every byte is claimed once: by the copy, or by the writer, which then reads the original. run()
// returns when the originals are no longer needed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
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
  void add(std::byte* copy, std::uint64_t nbytes, const Mapping& memory);

  // Copies the bytes that no writer takes.  Calls `when_slow` once, on this thread, when staging
  // memory turns out to cost more than a disk; from then on a writer may call read().  If run()
  // throws, it first waits for reads of originals to end, and later calls of read() throw.
  void run(std::size_t n_threads, const Poll& poll, const WhenSlow& when_slow);
  std::uint64_t nbytes_copied() const { return nbytes_copied_.load(std::memory_order_relaxed); }

  void read(const std::byte* copy, std::size_t nbytes, const Use& use) override;
  void peek(const std::byte* copy, std::span<std::byte> out) override;
  // Ends the writer's reads, complete or not.  Afterwards the copies' memory is not used.
  void close();

 private:
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
  std::size_t part_at(std::uint64_t at) const;
  void race_with_writer(std::size_t n_threads);
  bool is_worthwhile() const;
  void copy_unit(std::size_t unit, MemoryGauge& gauge);
  void copy_range(std::uint64_t begin, std::uint64_t end) const;
  void make_present(std::uint64_t begin, std::uint64_t end) const;
  void wait_for_writer(const Poll& poll);
  void fail() noexcept;
  std::optional<std::uint64_t> position_of(const std::byte* copy);
  Found find(std::uint64_t at, std::size_t nbytes);
  void done_with(const Found& found, std::size_t nbytes_read);
  void for_each(const std::byte* copy, std::size_t nbytes, bool counts, const Use& use);

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
