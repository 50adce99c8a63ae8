// Every system call of a save and of a load fails once, in turn, in every way that matters.  Needs
// the fault injection points of core/io/system.h (PTSAVE_FAULT_INJECTION).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <ostream>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "common/written_archive.h"
#include "core/base/error.h"
#include "core/io/file.h"
#include "core/io/late_release.h"
#include "core/io/source.h"
#include "core/io/system.h"
#include "core/memory/pages.h"
#include "core/read/reader.h"
#include "core/write/appended_archive.h"
#include "core/write/file_plan.h"
#include "core/write/payloads.h"
#include "core/write/writer.h"

namespace ptsave {
namespace {

using namespace common;
using Names = std::set<std::string>;

// What happens to the n-th call, or to all from the n-th on.
struct Fault {
  int errnum = 0;  // 0: the call transfers less
  std::size_t (*cut)(std::size_t) = nullptr;
  bool lasting = false;
  std::string_view only = {};  // empty: any call counts
};

// Injects one fault for as long as it lives.  Safe for concurrent use by the threads under test.
class Injection {
 public:
  Injection(const Fault& fault, int n) : fault_(fault), n_left_(n) {
    active = this;
    sys::fault_hook = &hook;
  }
  Injection(const Injection&) = delete;
  Injection& operator=(const Injection&) = delete;
  ~Injection() {
    sys::fault_hook = nullptr;
    active = nullptr;
  }

  bool happened() const { return happened_; }
  // The call that failed, and whether the new file had its name by then.
  std::string call() const { return call_; }
  bool after_rename() const { return after_rename_; }

 private:
  static int hook(const char* call, std::size_t* nbytes) { return active->count(call, nbytes); }

  int count(const char* call, std::size_t* nbytes) {
    const std::lock_guard lock(mutex_);
    const bool counts = (fault_.only.empty() || fault_.only == call) &&
                        (fault_.cut == nullptr || nbytes != nullptr);
    if (counts) --n_left_;
    if (counts && (fault_.lasting ? n_left_ <= 0 : n_left_ == 0)) {
      if (!std::exchange(happened_, true)) {
        call_ = call;
        after_rename_ = renamed_;
      }
      if (fault_.cut == nullptr) return fault_.errnum;
      *nbytes = fault_.cut(*nbytes);
      return 0;
    }
    renamed_ |= std::string_view(call) == "renameat";
    return 0;
  }

  static inline Injection* active = nullptr;
  const Fault fault_;
  std::mutex mutex_;
  int n_left_;
  bool renamed_ = false;
  bool happened_ = false;
  std::string call_;
  bool after_rename_ = false;
};

std::size_t one(std::size_t /*nbytes*/) { return 1; }
std::size_t half(std::size_t nbytes) { return (nbytes + 1) / 2; }
std::size_t none(std::size_t /*nbytes*/) { return 0; }

// Has a device take memory at any multiple of 4 bytes, as NVMe drives do, for as long as it lives.
// This disk may want more: it then gets memory that is aligned as it wants, or refuses.
class TensorTakingDevice {
 public:
  explicit TensorTakingDevice(bool transfers_less) {
    n_writes = 0;
    cuts = transfers_less;
    sys::fault_hook = &hook;
    sys::device_hook = [](std::uint32_t alignment) { return std::min(alignment, 4u); };
  }
  TensorTakingDevice(const TensorTakingDevice&) = delete;
  TensorTakingDevice& operator=(const TensorTakingDevice&) = delete;
  ~TensorTakingDevice() {
    sys::fault_hook = nullptr;
    sys::device_hook = nullptr;
  }

  static inline std::atomic<int> n_writes{0};

 private:
  static int hook(const char* call, std::size_t* nbytes) {
    const std::string_view name(call);
    if (name == "pwritev") {
      ++n_writes;
      if (cuts && *nbytes > 8192) *nbytes = 4096;
    }
    return 0;
  }

  static inline std::atomic<bool> cuts{false};
};

std::vector<Record> contents() { return records_of({100, 9000, 0, 20000, 3}); }

// What an undisturbed save writes.
const std::string& whole_archive() {
  static const std::string kBytes = reference(contents());
  return kBytes;
}

// What a call under test came to.
struct Outcome {
  int n;  // the number of the call that was to fail
  int errnum;
  bool happened;
  std::string call;
};

// Makes attempts with a fault in the first call, in the second, and so on.  The first attempt with
// too few calls for a fault must succeed.
void for_each_call(const std::function<Outcome(int n)>& attempt,
                   const std::function<void(const Outcome&)>& check) {
  for (int n = 1;; ++n) {
    const Outcome outcome = attempt(n);
    if (!outcome.happened) {
      EXPECT_EQ(outcome.errnum, 0);
      return;
    }
    check(outcome);
  }
}

// Makes the file `name`, next to `others`, with each call failing once.  It must be whole, or not
// there.
void expect_nothing_or_whole(const Folder& folder, const std::string& name,
                             const std::string& expected, const std::set<std::string>& others,
                             const std::function<void(int n)>& make) {
  for (const int errnum : {EIO, ENOSPC}) {
    bool happened = true;
    for (int n = 1; happened; ++n) {
      ::unlink((folder / name).c_str());
      const Injection injection({errnum}, n);
      bool failed = false;
      try {
        make(n);
      } catch (const IoError& error) {
        failed = true;
        EXPECT_EQ(error.errnum(), errnum) << injection.call();
      }
      happened = injection.happened();
      const bool is_there = !failed || injection.after_rename();
      std::set<std::string> names = others;
      if (is_there) names.insert(name);
      if (injection.call() != "unlinkat") {
        EXPECT_EQ(folder.names(), names) << injection.call();
      }
      if (is_there) {
        EXPECT_TRUE(read_file(folder / name) == expected) << injection.call();
      }
    }
  }
}

// How a checkpoint is saved.
struct Variant {
  bool direct;
  bool durable;
  bool replaces;  // an old file is there
  std::size_t n_threads;
};

std::ostream& operator<<(std::ostream& out, const Variant& variant) {
  return out << (variant.direct ? "direct " : "buffered ") << (variant.durable ? "durable " : "")
             << (variant.replaces ? "replacing " : "fresh ") << variant.n_threads << " threads";
}

// One save, as the extension module does it.
void save(const std::string& path, const Variant& variant) {
  static const Scenario kScenario(contents());
  const ArchiveLayout& layout = kScenario.layout();
  const WriteOptions options{true, variant.n_threads, 4096};
  Progress progress{0};
  AtomicFile target(path, path);
  target.file().preallocate(layout.nbytes());
  if (variant.direct) {
    write_direct(layout, kScenario.payloads(), target.file(), options, progress, kNoPoll);
  } else {
    write_buffered(layout, kScenario.payloads(), target.file(), 0, options, progress, kNoPoll);
  }
  target.commit(variant.durable);
}

// Calls whose failure a save survives: they make it better, not possible.
bool is_optional(const std::string& call) {
  static const Names kOptional{"flock",     "fchown",   "fcntl", "fstatat",
                               "open_path", "unlinkat", "reopen"};
  return kOptional.contains(call);
}

// Calls that are made again when the blocks of replaced files are free.
bool is_repeated(const std::string& call, int errnum) {
  const bool is_full = errnum == ENOSPC || errnum == EDQUOT;
  return is_full && (call == "fallocate" || call == "pwrite");
}

class SaveFaults : public testing::TestWithParam<Variant> {
 protected:
  SaveFaults() : path_(folder_ / "model.pt") {}

  // Runs one save with a fault, and checks what must hold whether it fails or not.
  Outcome save_with(const Fault& fault, int n) {
    prepare();
    const std::size_t descriptors = n_descriptors();
    const Injection injection(fault, n);
    int errnum = 0;
    try {
      save(path_, GetParam());
    } catch (const IoError& error) {
      errnum = error.errnum();
      EXPECT_NE(errnum, 0) << error.what();
      EXPECT_EQ(error.path(), path_);
    }
    const std::string context = "call " + std::to_string(n) + ": " + injection.call();
    EXPECT_EQ(n_descriptors(), descriptors) << context;
    check_file(errnum != 0 && !injection.after_rename(), context);
    if (injection.call() != "unlinkat") check_no_leftovers(context);
    return {n, errnum, injection.happened(), injection.call()};
  }
  void for_each_call(const Fault& fault, const std::function<void(const Outcome&)>& check) {
    ptsave::for_each_call([&](int n) { return save_with(fault, n); }, check);
  }

  void check_all_calls(int errnum) {
    for_each_call({errnum}, [&](const Outcome& outcome) {
      if (outcome.errnum == 0) {
        EXPECT_TRUE(is_optional(outcome.call) || is_repeated(outcome.call, errnum))
            << outcome.call << " may not fail unnoticed";
      } else {
        EXPECT_EQ(outcome.errnum, errnum) << outcome.call;
      }
    });
    EXPECT_TRUE(n_threads_becomes(threads_));
  }

 private:
  void prepare() {
    for (const std::string& name : folder_.names()) ::unlink((folder_ / name).c_str());
    if (GetParam().replaces) write_file(path_, "old");
  }

  void check_file(bool old, const std::string& context) const {
    if (!old) {
      EXPECT_TRUE(read_file(path_) == whole_archive()) << context;
    } else if (GetParam().replaces) {
      EXPECT_EQ(read_file(path_), "old") << context;
    } else {
      EXPECT_FALSE(folder_.names().contains("model.pt")) << context;
    }
  }

  void check_no_leftovers(const std::string& context) const {
    for (const std::string& name : folder_.names()) EXPECT_EQ(name, "model.pt") << context;
  }

  Folder folder_;
  std::string path_;
  std::size_t threads_ = n_threads();
};

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const bool direct : {false, true}) {
    for (const bool durable : {false, true}) {
      for (const bool replaces : {false, true}) {
        for (const std::size_t n_threads : {0u, 3u}) {
          all.push_back({direct, durable, replaces, n_threads});
        }
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Variants, SaveFaults, testing::ValuesIn(variants()));

// Checks of what a save with a fault came to.
void expect_success(const Outcome& outcome) { EXPECT_EQ(outcome.errnum, 0) << outcome.call; }
std::function<void(const Outcome&)> expect_errno(int errnum) {
  return [errnum](const Outcome& outcome) { EXPECT_EQ(outcome.errnum, errnum) << outcome.call; };
}

TEST_P(SaveFaults, NoSpace) { check_all_calls(ENOSPC); }
TEST_P(SaveFaults, InputOutputError) { check_all_calls(EIO); }
TEST_P(SaveFaults, Quota) { check_all_calls(EDQUOT); }

TEST_P(SaveFaults, NoSpaceEvenWithoutReplacedFiles) {
  for (const int errnum : {ENOSPC, EDQUOT}) {
    for (const std::string_view call : {"fallocate", "pwrite"}) {
      for_each_call({errnum, nullptr, true, call}, expect_errno(errnum));
    }
  }
}

TEST_P(SaveFaults, InterruptedCallsAreRepeated) { for_each_call({EINTR}, expect_success); }

// From the n-th call on, so that cleaning up fails too: then leftovers are allowed, hanging is not.
TEST_P(SaveFaults, NothingWorksAnyMore) {
  for (const std::string_view only : {"pwrite", "fallocate", "fsync", "renameat", "fstat"}) {
    for_each_call({EIO, nullptr, true, only}, expect_errno(EIO));
  }
}

TEST_P(SaveFaults, ShortTransfersAreContinued) {
  for (const auto cut : {&one, &half}) {
    for_each_call({0, cut}, expect_success);
    expect_success(save_with({0, cut, true}, 1));
  }
}

TEST_P(SaveFaults, ATransferOfNothingIsAnError) {
  for_each_call({0, &none, true, "pwrite"}, expect_errno(EIO));
}

// What file systems of limited talents answer.
TEST_P(SaveFaults, UnsupportedCallsAreDoneWithout) {
  constexpr std::pair<std::string_view, int> kRefusals[] = {
      {"fallocate", EOPNOTSUPP}, {"fallocate", ENOSYS}, {"fchmod", EOPNOTSUPP},
      {"fchmod", ENOSYS},        {"fchmod", EPERM},     {"fchown", EPERM},
      {"flock", ENOLCK},         {"flock", EOPNOTSUPP},
  };
  for (const auto& [call, errnum] : kRefusals) {
    for_each_call({errnum, nullptr, false, call}, expect_success);
  }
}

TEST_P(SaveFaults, DirectWritesThatAreRefusedGoThroughTheCache) {
  if (!GetParam().direct) return;
  for_each_call({EINVAL, nullptr, false, "pwrite"}, [](const Outcome& outcome) {
    // The tail is written through the cache anyway; EINVAL is an error there.
    EXPECT_TRUE(outcome.errnum == 0 || (outcome.errnum == EINVAL && outcome.n > 1));
  });
}

// A page cache whose memory has to be fetched from a virtual machine's host.
std::size_t expensive(std::size_t nbytes) {
  constexpr std::chrono::milliseconds kCost{5};
  const auto begin = thread_cpu_time();
  while (thread_cpu_time() - begin < kCost) {
  }
  return nbytes;
}

TEST(MemoryGauge, OnePauseOfTheProcessorIsNoExpensiveCache) {
  constexpr std::size_t kNbytes = std::size_t{1} << 20;
  MemoryGauge gauge;
  for (int i = 0; i < 8; ++i) {
    gauge.note(kNbytes, std::chrono::milliseconds{i % 4 == 0 ? 50 : 0});
    EXPECT_TRUE(gauge.is_cheap()) << i;
  }
  for (int i = 0; i < 5; ++i) gauge.note(kNbytes, std::chrono::milliseconds{3});
  EXPECT_FALSE(gauge.is_cheap());
}

TEST(MemoryGauge, AnExpensiveCacheIsLeft) {
  const std::vector<Record> records = records_of({3 << 20});
  const Scenario scenario(records);
  const ArchiveLayout& layout = scenario.layout();
  constexpr std::size_t kChunkNbytes = std::size_t{64} << 10;
  for (const bool costs : {false, true}) {
    const Folder folder;
    for (const std::size_t n_threads : {std::size_t{0}, std::size_t{2}}) {
      const WriteOptions options{.n_threads = n_threads,
                                 .chunk_nbytes = kChunkNbytes,
                                 .n_direct_threads = 2 * n_threads,
                                 .direct_nbytes = 0};
      AtomicFile file(folder / "archive", "archive");
      if (!file.file().direct_io_alignment().supported()) GTEST_SKIP() << "no direct I/O here";
      file.file().preallocate(layout.nbytes());
      Progress progress{0};
      ArchiveBody body(layout, scenario.payloads(), nullptr, true, kChunkNbytes);
      {
        std::optional<Injection> injection;
        if (costs) injection.emplace(Fault{0, &expensive, true, "pwrite"}, 1);
        write_to_file(body, file.file(), 0, options, progress, kNoPoll);
      }
      EXPECT_EQ(progress.load(), layout.nbytes());
      EXPECT_EQ(file.file().is_cached(0, layout.nbytes()), !costs) << n_threads;
      file.commit(false);
      EXPECT_TRUE(read_file(folder / "archive") == reference(records));
    }
  }
}

TEST_P(SaveFaults, DirectoriesThatNeedNoSync) {
  if (!GetParam().durable) return;
  expect_success(save_with({EINVAL, nullptr, false, "fsync"}, 2));
  EXPECT_EQ(save_with({EINVAL, nullptr, false, "fsync"}, 1).errnum, EINVAL) << "the file needs it";
}

TEST_P(SaveFaults, RefusedRenameLeavesTheOldFile) {
  for (const int errnum : {EXDEV, EBUSY, EPERM, EACCES, EROFS}) {
    EXPECT_EQ(save_with({errnum, nullptr, false, "renameat"}, 1).errnum, errnum);
  }
}

TEST(Durability, SyncsTheFileBeforeItsNameAndTheNameBeforeItReturns) {
  static std::vector<std::string> calls;
  calls.clear();
  sys::fault_hook = [](const char* call, std::size_t*) {
    if (std::string_view(call).ends_with("sync") || std::string_view(call) == "renameat") {
      calls.emplace_back(call);
    }
    return 0;
  };
  const Folder folder;
  save(folder / "model.pt", {false, false, false, 0});
  EXPECT_EQ(calls, std::vector<std::string>{"renameat"});
  calls.clear();
  save(folder / "model.pt", {true, true, true, 0});
  sys::fault_hook = nullptr;
  EXPECT_EQ(calls, (std::vector<std::string>{"fsync", "renameat", "fsync"}));
}

// Number of calls on a disk that is full until the blocks of replaced files are free.
int n_calls_on_full_disk = 0;
int full_until_released(const char* call, std::size_t* /*nbytes*/) {
  const std::string_view name = call;
  if (name != "pwrite" && name != "fallocate") return 0;
  if (++n_calls_on_full_disk % 2 != 0) return ENOSPC;
  EXPECT_EQ(n_removed_files_open(), 0U);
  return 0;
}

TEST(FullDisk, IsAskedAgainWhenReplacedFilesAreGone) {
  const Folder folder;
  const std::string path = folder / "model.pt";
  const std::string bytes(std::size_t{16} << 20, 'x');
  write_file(path, bytes);
  const File other = File::open_for_writing(folder / "other.pt");
  for (int i = 0; i < 10; ++i) {
    AtomicFile replacement(path, path);
    replacement.file().write_at(0, bytes.data(), bytes.size());
    replacement.commit(false);
    n_calls_on_full_disk = 0;
    sys::fault_hook = &full_until_released;
    if (i % 2 == 0) {
      EXPECT_NO_THROW(other.preallocate(1000));
    } else {
      EXPECT_NO_THROW(other.write_at(0, "new", 3));
    }
    sys::fault_hook = nullptr;
    EXPECT_EQ(n_calls_on_full_disk, 2);
  }
  finish_releases();
}

TEST(LeftoverFaults, AreHarmless) {
  const Folder folder;
  const std::string path = folder / "model.pt";
  const std::string leftover = folder / ".model.pt.0123456789abcdef.ptsave";
  for (int n = 1; n < 10; ++n) {
    write_file(leftover, "half");
    {
      const Injection injection({EIO}, n);
      try {
        save(path, {false, false, true, 0});
      } catch (const IoError& error) {
        EXPECT_EQ(error.errnum(), EIO);
      }
    }
    save(path, {false, false, true, 0});
    EXPECT_EQ(folder.names(), Names{"model.pt"});
  }
}

TEST(LeftoverFaults, StayWhereLocksDoNotWork) {
  // Without locks a leftover cannot be told from a file that is being written.
  const Folder folder;
  const std::string leftover = ".model.pt.0123456789abcdef.ptsave";
  write_file(folder / leftover, "half");
  const Injection injection({ENOLCK, nullptr, true, "flock"}, 1);
  save(folder / "model.pt", {false, false, false, 0});
  EXPECT_EQ(folder.names(), (Names{"model.pt", leftover}));
}

// ----------------------------------------------------------------------------------------- reading

class LoadFaults : public testing::TestWithParam<std::tuple<bool, std::size_t>> {
 protected:
  LoadFaults() : path_(folder_ / "model.pt") { save(path_, {false, false, false, 0}); }

  bool cold() const { return std::get<0>(GetParam()); }

  // One load with a fault: the errno it failed with, -1 for a FormatError, 0 if all payloads came.
  Outcome load_with(const Fault& fault, int n) {
    if (cold()) drop_from_page_cache(path_);
    const std::size_t descriptors = n_descriptors();
    const Injection injection(fault, n);
    const int result = load();
    EXPECT_EQ(n_descriptors(), descriptors);
    return {n, result, injection.happened(), injection.call()};
  }
  void for_each_call(const Fault& fault, const std::function<void(const Outcome&)>& check) {
    ptsave::for_each_call([&](int n) { return load_with(fault, n); }, check);
  }

 private:
  int load() const try {
    ArchiveReader reader({File::open_for_reading(path_), 0});
    const std::vector<Record> records = contents();
    std::vector<std::size_t> wanted(records.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = i;
    reader.start(wanted, std::get<1>(GetParam()), true, cold());
    EXPECT_TRUE(reader.wait_all(kNoPoll).empty());
    for (const std::size_t i : wanted) {
      const LoadedPayload payload = reader.payload(i);
      EXPECT_TRUE(text_of(payload.data, payload.nbytes) == records[i].data);
    }
    return 0;
  } catch (const IoError& error) {
    EXPECT_EQ(error.path(), path_);
    return error.errnum() == 0 ? -1 : error.errnum();
  } catch (const FormatError&) {
    return -1;
  }

  Folder folder_;
  std::string path_;
};

INSTANTIATE_TEST_SUITE_P(Variants, LoadFaults,
                         testing::Combine(testing::Bool(), testing::Values(0u, 3u)));

TEST_P(LoadFaults, AnyCallMayFail) {
  for (const int errnum : {EIO, ENOMEM, ESTALE, EINVAL}) {
    for_each_call({errnum}, [&](const Outcome& outcome) {
      // A fast path that fails gives way to the plain one.
      const bool may_succeed = outcome.call != "fstat";
      EXPECT_TRUE(outcome.errnum == errnum || (may_succeed && outcome.errnum == 0))
          << outcome.call << " " << outcome.errnum;
    });
  }
}

TEST_P(LoadFaults, TheDiskIsGone) {
  for_each_call({EIO, nullptr, true, "pread"}, [](const Outcome& outcome) {
    EXPECT_TRUE(outcome.errnum == EIO || (outcome.n > 1 && outcome.errnum == 0)) << outcome.errnum;
  });
}

TEST_P(LoadFaults, InterruptedCallsAreRepeated) { for_each_call({EINTR}, expect_success); }

TEST_P(LoadFaults, ShortTransfersAreContinued) {
  for (const auto cut : {&one, &half}) {
    for_each_call({0, cut}, expect_success);
    expect_success(load_with({0, cut, true}, 1));
  }
}

TEST_P(LoadFaults, AFileThatEndsEarly) { for_each_call({0, &none, true}, expect_errno(-1)); }

// ------------------------------------------------------------------------------------- conversions

// One file made of parts of another, as the extension module does it.
void convert(std::span<const ByteSource> sources, const std::string& path, bool direct) {
  const std::vector<SourcePayload> payloads{{0, 5000, {}}, {0, 0, {}}};
  const std::vector<std::uint64_t> sizes{20'000, 3000};
  const std::string header = "header";
  constexpr std::size_t kChunkNbytes = 8192;
  SourceStager stager(sources, payloads, {max_staged_nbytes(kChunkNbytes), 2});
  const WriteOptions options{.n_threads = 2, .chunk_nbytes = kChunkNbytes, .stager = &stager};
  PackedBody body(header, sizes, stager, true, kChunkNbytes);
  Progress progress{0};
  AtomicFile target(path, path);
  if (direct && target.file().direct_io_alignment().supported()) {
    write_direct(body, target.file(), 0, options, progress, [] {});
  } else {
    write_to_file(body, target.file(), 0, options, progress, [] {});
  }
  target.commit(true);
}

class ConversionFaults : public testing::TestWithParam<bool> {};

TEST_P(ConversionFaults, LeaveNothingOrAWholeFile) {
  const Folder folder;
  const std::string source = noise(30'000, 1);
  const std::string expected = "header" + source.substr(5000, 20'000) + source.substr(0, 3000);
  write_file(folder / "source", source);
  const std::vector<ByteSource> sources = sources_of(file_source(folder / "source"));
  expect_nothing_or_whole(folder, "target", expected, {"source"}, [&](int n) {
    if (n % 2 == 0) drop_from_page_cache(folder / "source");
    convert(sources, folder / "target", GetParam());
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, ConversionFaults, testing::Bool(),
                         [](const auto& each) { return each.param ? "Direct" : "Buffered"; });

// -------------------------------------------------------------------------------- growing archives

// Two batches and the end; a batch that fails is appended again.  Returns how many calls failed.
int grow(const std::string& path, bool direct) {
  const std::vector<Record> records = contents();
  std::vector<RecordSpec> first = specs_of(records);
  std::vector<RecordSpec> second = first;
  for (RecordSpec& spec : second) spec.name = "again-" + spec.name;
  const Payloads payloads = [&](std::size_t i) { return data_of(records[i].data); };
  const WriteOptions options{true, 2, 4096};
  AppendedArchive archive({path, path}, "archive", 64);
  int n_failed = 0;
  for (const auto* specs : {&first, &second}) {
    try {
      archive.append(*specs, payloads, direct, options, kNoPoll);
    } catch (const IoError&) {
      ++n_failed;
      archive.append(*specs, payloads, direct, options, kNoPoll);
    }
  }
  archive.sync();
  archive.close("pickle", true, true);
  return n_failed;
}

class GrowingFaults : public testing::TestWithParam<bool> {};

TEST_P(GrowingFaults, ABatchThatFailedCanBeRepeated) {
  const Folder folder;
  grow(folder / "expected", false);
  const std::string expected = read_file(folder / "expected");
  expect_nothing_or_whole(folder, "target", expected, {"expected"},
                          [&](int /*n*/) { grow(folder / "target", GetParam()); });
}

TEST_P(GrowingFaults, ShortTransfersAreContinued) {
  const Folder folder;
  grow(folder / "expected", false);
  const std::string expected = read_file(folder / "expected");
  for (const auto cut : {&one, &half}) {
    const Injection injection({0, cut, true, "pread"}, 1);
    grow(folder / "target", GetParam());
    EXPECT_TRUE(read_file(folder / "target") == expected);
  }
  for (int n = 1;; ++n) {
    const Injection injection({0, &half}, n);
    grow(folder / "target", false);
    EXPECT_TRUE(read_file(folder / "target") == expected);
    if (!injection.happened()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, GrowingFaults, testing::Bool(),
                         [](const auto& each) { return each.param ? "Direct" : "Buffered"; });

// ------------------------------------------------------------- a device that takes tensors

// Payloads at addresses that are `shift` bytes behind ones as the real disk wants them.
class PlacedPayloads {
 public:
  PlacedPayloads(const std::vector<Record>& records, const ArchiveLayout& layout,
                 std::size_t shift) {
    for (std::size_t i = 0; i < records.size(); ++i) {
      constexpr std::size_t kPage = 4096;
      memory_.emplace_back(records[i].data.size() + 3 * kPage, '\0');
      auto* const begin = data_of(memory_.back());
      const auto address = reinterpret_cast<std::uintptr_t>(begin);
      const std::size_t lead = align_up(address, kPage) - address;
      std::byte* const at = begin + lead + layout.record(i).payload_offset % kPage + shift;
      std::memcpy(at, records[i].data.data(), records[i].data.size());
      places_.push_back(at);
    }
  }
  const std::byte* operator()(std::size_t i) const { return places_[i]; }

 private:
  std::vector<std::string> memory_;
  std::vector<std::byte*> places_;
};

using TakenFrom = testing::TestWithParam<std::tuple<std::size_t, bool, std::size_t>>;

TEST_P(TakenFrom, APlaceInMemory) {
  const auto [shift, transfers_less, n_threads] = GetParam();
  const std::vector<Record> records = records_of({100, 300000, 0, 2u << 20, 3, 70000, 65536});
  const Scenario scenario(records);
  const ArchiveLayout& layout = scenario.layout();
  const PlacedPayloads placed(records, layout, shift);
  const Payloads payloads = [&](std::size_t i) { return placed(i); };
  WriteOptions options{true, n_threads, std::size_t{256} << 10};
  const Folder folder;
  Progress progress{0};
  const std::string expected = reference(records);
  for (const bool are_still : {false, true}) {
    options.payloads_are_still = are_still;
    const TensorTakingDevice device(transfers_less);
    AtomicFile target(folder / "target", "target");
    if (!target.file().direct_io_alignment().supported()) GTEST_SKIP() << "no direct I/O here";
    target.file().preallocate(layout.nbytes());
    write_direct(layout, payloads, target.file(), options, progress, kNoPoll);
    target.commit(false);
    EXPECT_EQ(TensorTakingDevice::n_writes > 0, are_still) << "live tensors are copied";
    EXPECT_TRUE(read_file(folder / "target") == expected);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, TakenFrom,
    testing::Combine(testing::Values(std::size_t{0}, std::size_t{4}, std::size_t{2}),
                     testing::Bool(), testing::Values(std::size_t{0}, std::size_t{3})));

}  // namespace
}  // namespace ptsave
