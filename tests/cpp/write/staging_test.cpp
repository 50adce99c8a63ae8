// Payloads that come from, or go to, an accelerator: a double that takes its time, finishes in any
// order and fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/written_archive.h"
#include "core/pipeline/stager.h"
#include "core/read/reader.h"
#include "core/write/payloads.h"

namespace ptsave {
namespace {

using namespace common;

struct CopyFailed : std::runtime_error {
  CopyFailed() : std::runtime_error("the copy has failed") {}
};

// Threads that do what they are given, each after a while of its own: in any order.
class Engines {
 public:
  Engines() {
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      threads_[i] = std::thread([this, i] { run(i); });
    }
  }
  Engines(const Engines&) = delete;
  Engines& operator=(const Engines&) = delete;
  ~Engines() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void give(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_one();
  }

 private:
  void run(std::size_t seed) {
    std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopped_ || !work_.empty(); });
        if (work_.empty()) return;
        work = std::move(work_.front());
        work_.pop_front();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool stopped_ = false;
  std::array<std::thread, 3> threads_;
};

// A copy's end, that somebody may wait for.
class Event {
 public:
  void happen(bool failed) {
    const std::lock_guard lock(mutex_);
    happened_ = true;
    failed_ = failed;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return happened_; });
    if (failed_) throw CopyFailed();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
  bool failed_ = false;
};

// ------------------------------------------------------------------------------------------ saving

class StagerDouble final : public Stager {
 public:
  StagerDouble(std::vector<std::string> payloads, std::set<std::size_t> staged)
      : payloads_(std::move(payloads)), staged_(std::move(staged)) {}

  bool stages(std::size_t record) const override { return staged_.contains(record); }

  std::unique_ptr<StagedPieces> stage(std::size_t chunk,
                                      std::span<const PayloadPiece> pieces) override {
    EXPECT_FALSE(pieces.empty());
    note(chunk);
    auto staged = std::make_unique<Pieces>(count_);
    auto event = std::make_shared<Event>();
    const std::vector<PayloadPiece> wanted(pieces.begin(), pieces.end());
    const bool fails = chunk == failing_chunk;
    engines_.give([this, wanted, event, fails, to = staged.get()] {
      for (const PayloadPiece& piece : wanted) {
        to->bytes += payloads_[piece.record].substr(piece.offset, piece.nbytes);
      }
      event->happen(fails);
    });
    event->wait();
    return staged;
  }

  // What was staged from is something else from now on.
  void overwrite() {
    for (std::string& payload : payloads_) std::ranges::fill(payload, 'X');
  }
  std::size_t max_in_memory() const { return count_->max; }

  std::size_t failing_chunk = ~std::size_t{0};

 private:
  // Of pieces, which may outlive the stager.
  struct Count {
    std::atomic<std::size_t> now{0};
    std::atomic<std::size_t> max{0};
  };
  struct Pieces final : StagedPieces {
    explicit Pieces(std::shared_ptr<Count> pieces) : count(std::move(pieces)) {
      const std::size_t n = ++count->now;
      std::size_t before = count->max;
      while (before < n && !count->max.compare_exchange_weak(before, n)) {
      }
    }
    ~Pieces() override {
      std::ranges::fill(bytes, 'Y');
      --count->now;
    }
    const std::byte* data() const override { return data_of(bytes); }

    std::shared_ptr<Count> count;
    std::string bytes;
  };

  void note(std::size_t chunk) {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(chunks_.insert(chunk).second) << "chunk " << chunk << " was staged twice";
  }

  std::vector<std::string> payloads_;
  const std::set<std::size_t> staged_;
  std::mutex mutex_;
  std::set<std::size_t> chunks_;
  const std::shared_ptr<Count> count_ = std::make_shared<Count>();
  Engines engines_;
};

std::vector<std::string> payloads_of(const std::vector<Record>& entries) {
  std::vector<std::string> payloads;
  payloads.reserve(entries.size());
  for (const Record& entry : entries) payloads.push_back(entry.data);
  return payloads;
}

// Every second record, but for one that is left where it is.
std::set<std::size_t> every_second(std::size_t n) {
  std::set<std::size_t> records;
  for (std::size_t i = 0; i < n; i += 2) records.insert(i);
  return records;
}

// Nobody may ask for a staged record's address: there is nothing in host memory.
void forget(std::vector<Record>& entries, const std::set<std::size_t>& staged) {
  for (const std::size_t i : staged) entries[i].hole = !entries[i].data.empty();
}

void expect_same_file(std::vector<Record> entries, std::uint64_t alignment = 64) {
  const std::set<std::size_t> staged = every_second(entries.size());
  const std::vector<std::string> payloads = payloads_of(entries);
  const std::string expected = reference(entries, alignment);
  forget(entries, staged);
  const Scenario scenario(std::move(entries), alignment);
  for (const Target target : kTargets) {
    for (const std::size_t n_threads : {0u, 1u, 3u}) {
      StagerDouble stager(payloads, staged);
      EXPECT_TRUE(scenario.write(target, {true, n_threads, kChunk, &stager}) == expected)
          << "target " << static_cast<int>(target) << ", threads " << n_threads;
      EXPECT_LE(stager.max_in_memory(), std::max<std::size_t>(n_threads, 1));
    }
  }
}

TEST(Stager, PayloadsOfEverySize) {
  expect_same_file(records_of({1, 40 * kChunk + 5, 1, 0, 7, kChunk, 3 * kChunk, 100, 0, 5000}));
  expect_same_file(records_of(std::vector<std::size_t>(500, 40)));
  expect_same_file(records_of({0, 0, 0}));
  expect_same_file(records_of({1, 5000, 3, 0, 70000, 9}), 1);
}

TEST(Stager, PayloadsThatLookLikeDescriptorsAreCutByChunks) {
  std::vector<Record> entries = records_of({0, 3950, 100, 5000});
  for (std::size_t nbytes = 3880; nbytes < 3960; nbytes += 2) {
    entries[1].data = noise(nbytes, nbytes);
    entries[2].data.replace(0, 4, "PK\7\10");
    expect_same_file(entries, 1);
  }
}

TEST(Stager, ErrorsComeOut) {
  std::vector<Record> entries = records_of({10, 50 * kChunk, 50 * kChunk, 3});
  const std::vector<std::string> payloads = payloads_of(entries);
  const std::set<std::size_t> staged = {1, 2};
  forget(entries, staged);
  const Scenario scenario(std::move(entries));
  for (const Target target : kTargets) {
    for (const std::size_t n_threads : {0u, 3u}) {
      StagerDouble stager(payloads, staged);
      stager.failing_chunk = 20;
      EXPECT_THROW(scenario.write(target, {true, n_threads, kChunk, &stager}), CopyFailed);
    }
  }
}

TEST(StagedAhead, WritesWhatWasThere) {
  std::vector<Record> entries = records_of({1, 40 * kChunk + 5, 1, 0, 7, kChunk, 3 * kChunk, 100});
  const std::set<std::size_t> staged = every_second(entries.size());
  const std::vector<std::string> payloads = payloads_of(entries);
  const std::string expected = reference(entries);
  forget(entries, staged);
  const Scenario scenario(std::move(entries));
  for (const std::size_t n_threads : {0u, 3u}) {
    auto stager = std::make_unique<StagerDouble>(payloads, staged);
    StagedAhead ahead(scenario.layout(), std::move(stager), kChunk);
    ahead.run(n_threads, kNoPoll);
    for (const Target target : kTargets) {  // one write after the other
      EXPECT_TRUE(scenario.write(target, {true, n_threads, kChunk, &ahead}) == expected);
    }
    EXPECT_THROW(scenario.write(Target::kMemory, {true, n_threads, 2 * kChunk, &ahead}),
                 std::logic_error);
  }
}

TEST(StagedAhead, ErrorsComeOut) {
  std::vector<Record> entries = records_of({10, 50 * kChunk});
  auto stager = std::make_unique<StagerDouble>(payloads_of(entries), std::set<std::size_t>{1});
  stager->failing_chunk = 7;
  const Scenario scenario(std::move(entries));
  StagedAhead ahead(scenario.layout(), std::move(stager), kChunk);
  EXPECT_THROW(ahead.run(3, kNoPoll), CopyFailed);
}

// ----------------------------------------------------------------------------------------- loading

// Targets are strings; a lease that is used again before its copies are done spoils them.
class UnstagerDouble final : public Unstager {
 public:
  UnstagerDouble(std::vector<std::string>& targets, std::size_t max_leases)
      : targets_(targets), max_leases_(max_leases) {}
  ~UnstagerDouble() override {
    try {
      UnstagerDouble::drain();
    } catch (const CopyFailed&) {
      return;
    }
  }

  std::unique_ptr<Lease> lease(std::size_t nbytes) override {
    std::unique_lock lock(mutex_);
    while (n_leases_ == max_leases_ && retire_oldest(lock)) {
    }
    EXPECT_LT(n_leases_, max_leases_) << "a worker holds more than one";
    ++n_leases_;
    return std::make_unique<Buffer>(*this, nbytes);
  }

  void send(std::unique_ptr<Lease> lease, std::span<const Piece> pieces) override {
    if (n_sends++ == failing_send) throw CopyFailed();
    auto event = std::make_shared<Event>();
    const std::vector<Piece> wanted(pieces.begin(), pieces.end());
    const bool fails = n_sends == failing_copy;
    engines_.give([this, wanted, event, fails, from = lease->data()] {
      for (const Piece& piece : wanted) {
        std::memcpy(targets_[piece.target].data() + piece.offset, from + piece.at, piece.nbytes);
      }
      event->happen(fails);
    });
    const std::lock_guard lock(mutex_);
    sent_.emplace_back(std::move(lease), std::move(event));
  }

  void drain() override {
    std::unique_lock lock(mutex_);
    bool failed = false;
    for (bool more = true; more;) {
      try {
        more = retire_oldest(lock);
      } catch (const CopyFailed&) {
        failed = true;
      }
    }
    if (failed) throw CopyFailed();
  }

  std::size_t failing_send = ~std::size_t{0};
  std::size_t failing_copy = ~std::size_t{0};
  std::atomic<std::size_t> n_sends{0};

 private:
  struct Buffer final : Lease {
    Buffer(UnstagerDouble& unstager, std::size_t nbytes) : owner(unstager), bytes(nbytes, 'Z') {}
    ~Buffer() override {
      std::ranges::fill(bytes, 'Y');
      --owner.n_leases_;
    }
    std::byte* data() override { return data_of(bytes); }

    UnstagerDouble& owner;
    std::string bytes;
  };

  bool retire_oldest(std::unique_lock<std::mutex>& lock) {
    if (sent_.empty()) return false;
    auto [lease, event] = std::move(sent_.front());
    sent_.pop_front();
    lock.unlock();
    try {
      event->wait();
    } catch (...) {
      lock.lock();
      throw;
    }
    lock.lock();
    lease.reset();
    return true;
  }

  std::vector<std::string>& targets_;
  const std::size_t max_leases_;
  std::atomic<std::size_t> n_leases_{0};
  std::mutex mutex_;
  std::deque<std::pair<std::unique_ptr<Lease>, std::shared_ptr<Event>>> sent_;
  Engines engines_;
};

struct Load {
  std::vector<Destination> destinations;
  std::vector<std::string> targets;
  std::vector<std::string> expected;
};

// Parts of records, every third of them in host memory.
Load parts_of(const std::vector<Record>& records, std::size_t part_nbytes,
              std::vector<std::string>& in_memory) {
  Load load;
  in_memory.reserve(10000);  // addresses stay
  for (std::size_t i = 0; i < records.size(); ++i) {
    for (std::size_t at = 0; at < records[i].data.size(); at += part_nbytes) {
      const std::string part = records[i].data.substr(at, part_nbytes);
      Destination to{i, at, part.size(), nullptr};
      if ((at / part_nbytes + i) % 3 == 0) {
        in_memory.emplace_back(part.size(), 'A');
        to.place = data_of(in_memory.back());
      } else {
        to.target = load.targets.size();
        load.targets.emplace_back(part.size(), 'A');
        load.expected.push_back(part);
      }
      load.destinations.push_back(to);
    }
  }
  return load;
}

TEST(Unstager, PartsOfEverySize) {
  const std::vector<Record> records =
      records_of({100, 5 << 20, 1, 70000, 0, 3 << 20, 33000, 40, 40, 40, 2 << 20});
  const std::string bytes = archive(records);
  for (const std::size_t part : {std::size_t{777}, std::size_t{50000}, std::size_t{9} << 20}) {
    for (const std::size_t n_threads : {0u, 1u, 3u}) {
      std::vector<std::string> in_memory;
      Load load = parts_of(records, part, in_memory);
      const ArchiveFile file(bytes, 12288);
      if (part > 777) file.drop_from_page_cache();
      ArchiveReader reader(file.source());
      UnstagerDouble unstager(load.targets, 3);
      EXPECT_TRUE(reader.fill(load.destinations, n_threads, true, kNoPoll, &unstager).empty());
      unstager.drain();
      EXPECT_TRUE(load.targets == load.expected) << part << ", " << n_threads;
    }
  }
}

TEST(Unstager, ForeignArchivesAreReadAgain) {
  const std::vector<Record> records = records_of({100, 5 << 20, 1, 70000, 3 << 20});
  const std::string bytes = foreign_archive(records, 7, [](std::size_t) { return 0; });
  std::vector<std::string> in_memory;
  Load load = parts_of(records, 100000, in_memory);
  ArchiveReader reader(memory_source(bytes));
  UnstagerDouble unstager(load.targets, 3);
  EXPECT_TRUE(reader.fill(load.destinations, 3, true, kNoPoll, &unstager).empty());
  unstager.drain();
  EXPECT_TRUE(load.targets == load.expected);
}

TEST(Unstager, ErrorsComeOut) {
  const std::vector<Record> records = records_of({100, 5 << 20, 1, 70000, 9 << 20});
  const std::string bytes = archive(records);
  for (const bool at_once : {true, false}) {
    std::vector<std::string> in_memory;
    Load load = parts_of(records, 100000, in_memory);
    ArchiveReader reader(memory_source(bytes));
    UnstagerDouble unstager(load.targets, 3);
    (at_once ? unstager.failing_send : unstager.failing_copy) = 3;
    const auto fill = [&] {
      reader.fill(load.destinations, 3, true, kNoPoll, &unstager);
      unstager.drain();
    };
    EXPECT_THROW(fill(), CopyFailed);
  }
}

}  // namespace
}  // namespace ptsave
