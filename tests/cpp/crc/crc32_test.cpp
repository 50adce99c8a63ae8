// One suite over every kernel this CPU can run, checked against zlib; then the facade and the
// combine.
#include "core/crc/crc32.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace ptsave {
namespace {

constexpr std::size_t kLongestShort = 4096;
constexpr std::uint32_t kInitials[] = {0, 1, 0xDEADBEEF, 0xFFFFFFFF};

std::uint32_t zlib_crc32(std::uint32_t crc, const void* data, std::size_t nbytes) {
  // zlib takes a null pointer as a request for the initial value.
  if (nbytes == 0) return crc;
  return static_cast<std::uint32_t>(::crc32_z(crc, static_cast<const Bytef*>(data), nbytes));
}

std::uint32_t zlib_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b) {
  static_assert(sizeof(z_off_t) == 8);
  return static_cast<std::uint32_t>(::crc32_combine(crc_a, crc_b, static_cast<z_off_t>(nbytes_b)));
}

std::vector<unsigned char> random_bytes(std::size_t nbytes) {
  std::mt19937 generator(static_cast<std::mt19937::result_type>(nbytes));
  std::vector<unsigned char> bytes(nbytes);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(generator());
  return bytes;
}

// `nbytes` accessible bytes (whole pages) between two pages whose access is a fault.
class GuardedPages {
 public:
  explicit GuardedPages(std::size_t nbytes) : nbytes_(nbytes) {
    const std::size_t page = page_nbytes();
    void* const mapped =
        mmap(nullptr, nbytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    begin_ = static_cast<unsigned char*>(mapped) + page;
    if (mprotect(begin_, nbytes, PROT_READ | PROT_WRITE) != 0) std::abort();
    std::ranges::copy(random_bytes(nbytes), begin_);
  }
  ~GuardedPages() { munmap(begin_ - page_nbytes(), nbytes_ + 2 * page_nbytes()); }
  GuardedPages(const GuardedPages&) = delete;
  GuardedPages& operator=(const GuardedPages&) = delete;

  static std::size_t page_nbytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }
  unsigned char* begin() const { return begin_; }
  unsigned char* end() const { return begin_ + nbytes_; }

 private:
  unsigned char* begin_;
  std::size_t nbytes_;
};

class Crc32KernelTest : public testing::TestWithParam<Crc32Kernel> {
 protected:
  void SetUp() override {
    if (!GetParam().supported()) GTEST_SKIP() << GetParam().name << " needs another CPU";
  }

  static std::uint32_t update(std::uint32_t crc, const void* data, std::size_t nbytes) {
    return GetParam().update(crc, data, nbytes);
  }

  // The bytes arrive, their neighbours stay, and the checksum is theirs.
  static void check_copy(unsigned char* dst, const unsigned char* src, std::size_t nbytes) {
    constexpr unsigned char kUntouched = 0xA5;
    std::fill_n(dst - 1, nbytes + 2, kUntouched);
    ASSERT_EQ(GetParam().copy(0x1234'5678, dst, src, nbytes), zlib_crc32(0x1234'5678, src, nbytes));
    ASSERT_TRUE(std::equal(src, src + nbytes, dst));
    ASSERT_EQ(dst[-1], kUntouched);
    ASSERT_EQ(dst[nbytes], kUntouched);
  }
};

TEST_P(Crc32KernelTest, KnownValues) {
  EXPECT_EQ(update(0, "123456789", 9), 0xCBF43926u);  // the check value of the CRC catalogues
  EXPECT_EQ(update(0, "", 0), 0u);
  EXPECT_EQ(update(0, nullptr, 0), 0u);
  EXPECT_EQ(update(0xDEADBEEF, nullptr, 0), 0xDEADBEEFu);
}

TEST_P(Crc32KernelTest, EveryLength) {
  const auto bytes = random_bytes(kLongestShort);
  for (std::size_t nbytes = 0; nbytes <= kLongestShort; ++nbytes) {
    for (const std::uint32_t initial : kInitials) {
      ASSERT_EQ(update(initial, bytes.data(), nbytes), zlib_crc32(initial, bytes.data(), nbytes))
          << nbytes << " bytes after " << initial;
    }
  }
}

TEST_P(Crc32KernelTest, EveryAlignment) {
  const auto bytes = random_bytes(64 + 64 + kLongestShort);
  const std::size_t to_boundary = (64 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 64) % 64;
  for (std::size_t alignment = 0; alignment < 64; ++alignment) {
    const unsigned char* const data = bytes.data() + to_boundary + alignment;
    // All short lengths, then steps that are coprime to every block size.
    for (std::size_t nbytes = 0; nbytes <= kLongestShort; nbytes += nbytes < 600 ? 1 : 37) {
      ASSERT_EQ(update(0xDEADBEEF, data, nbytes), zlib_crc32(0xDEADBEEF, data, nbytes))
          << nbytes << " bytes at " << alignment;
    }
  }
}

TEST_P(Crc32KernelTest, TouchesNothingOutside) {
  const GuardedPages source(2 * GuardedPages::page_nbytes());
  const GuardedPages target(2 * GuardedPages::page_nbytes());
  for (std::size_t nbytes = 0; nbytes <= 1100; ++nbytes) {
    const unsigned char* const last = source.end() - nbytes;
    ASSERT_EQ(update(0, source.begin(), nbytes), zlib_crc32(0, source.begin(), nbytes));
    ASSERT_EQ(update(0, last, nbytes), zlib_crc32(0, last, nbytes));
    ASSERT_EQ(GetParam().copy(0, target.begin(), last, nbytes), zlib_crc32(0, last, nbytes));
    ASSERT_EQ(GetParam().copy(0, target.end() - nbytes, source.begin(), nbytes),
              zlib_crc32(0, source.begin(), nbytes));
  }
}

TEST_P(Crc32KernelTest, StreamedCopyTouchesNothingOutside) {
  const GuardedPages source(std::size_t{1} << 16);
  const GuardedPages target(std::size_t{1} << 16);
  for (std::size_t nbytes = 32768; nbytes <= 32768 + 130; ++nbytes) {
    const unsigned char* const last = source.end() - nbytes;
    ASSERT_EQ(GetParam().copy(0, target.begin(), last, nbytes), zlib_crc32(0, last, nbytes));
    ASSERT_EQ(GetParam().copy(0, target.end() - nbytes, source.begin(), nbytes),
              zlib_crc32(0, source.begin(), nbytes));
  }
}

TEST_P(Crc32KernelTest, LongBuffersWholeAndInPieces) {
  for (const std::size_t nbytes :
       {std::size_t{65536}, std::size_t{1'000'003}, std::size_t{8} << 20}) {
    const auto bytes = random_bytes(nbytes);
    const std::uint32_t expected = zlib_crc32(7, bytes.data(), nbytes);
    ASSERT_EQ(update(7, bytes.data(), nbytes), expected);
    std::mt19937 generator(1);
    std::uint32_t crc = 7;
    for (std::size_t done = 0; done < nbytes;) {
      const std::size_t piece = std::min<std::size_t>(generator() % 100'000, nbytes - done);
      crc = update(crc, bytes.data() + done, piece);
      done += piece;
    }
    ASSERT_EQ(crc, expected);
  }
}

TEST_P(Crc32KernelTest, UniformBytes) {
  for (const int value : {0x00, 0x80, 0xFF}) {
    const std::vector<unsigned char> bytes(100'000, static_cast<unsigned char>(value));
    for (const std::uint32_t initial : kInitials) {
      ASSERT_EQ(update(initial, bytes.data(), bytes.size()),
                zlib_crc32(initial, bytes.data(), bytes.size()));
    }
  }
}

TEST_P(Crc32KernelTest, CopyOfEveryLength) {
  const auto source = random_bytes(kLongestShort);
  std::vector<unsigned char> target(kLongestShort + 2);
  for (std::size_t nbytes = 0; nbytes <= kLongestShort; ++nbytes) {
    ASSERT_NO_FATAL_FAILURE(check_copy(target.data() + 1, source.data(), nbytes)) << nbytes;
  }
}

TEST_P(Crc32KernelTest, CopyAtEveryAlignment) {
  const auto source = random_bytes(100'000);
  std::vector<unsigned char> target(source.size());
  for (std::size_t to = 0; to < 64; ++to) {
    for (const std::size_t from : {std::size_t{0}, std::size_t{1}, to, 63 - to}) {
      for (const std::size_t nbytes : {500u, 16383u, 16384u, 16500u, 40'000u + 17u}) {
        ASSERT_NO_FATAL_FAILURE(check_copy(target.data() + 1 + to, source.data() + from, nbytes))
            << nbytes << " bytes from " << from << " to " << to;
      }
    }
  }
}

TEST_P(Crc32KernelTest, LongCopy) {
  const auto source = random_bytes((std::size_t{4} << 20) + 13);
  std::vector<unsigned char> target(source.size() + 2);
  check_copy(target.data() + 1, source.data(), source.size());
}

INSTANTIATE_TEST_SUITE_P(Kernels, Crc32KernelTest,
                         testing::ValuesIn(crc32_kernels().begin(), crc32_kernels().end()),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(Crc32Test, ActiveKernelIsTheLastSupported) {
  const auto kernels = crc32_kernels();
  ASSERT_STREQ(kernels.front().name, "portable");
  ASSERT_TRUE(kernels.front().supported());
  const Crc32Kernel* best = nullptr;
  for (const Crc32Kernel& kernel : kernels) {
    if (kernel.supported()) best = &kernel;
  }
  EXPECT_EQ(&crc32_active_kernel(), best);
}

TEST(Crc32Test, FacadeIsZlibs) {
  const auto bytes = random_bytes(100'000);
  std::vector<unsigned char> target(bytes.size());
  const std::uint32_t expected = zlib_crc32(42, bytes.data(), bytes.size());
  EXPECT_EQ(crc32(42, bytes.data(), bytes.size()), expected);
  EXPECT_EQ(crc32_copy(42, target.data(), bytes.data(), bytes.size()), expected);
  EXPECT_EQ(target, bytes);
}

// Runs in a fresh process (see below; user-mode emulators cannot start one), whose first use of a
// CRC this is.
[[noreturn]] void first_calls_in_many_threads() {
  constexpr std::size_t kThreads = 16;
  std::barrier start(kThreads);
  std::vector<std::uint32_t> results(kThreads);
  std::vector<std::thread> threads;
  for (std::uint32_t& result : results) {
    threads.emplace_back([&start, &result] {
      start.arrive_and_wait();
      result = crc32(0, "123456789", 9);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const bool all_right = std::ranges::all_of(results, [](auto crc) { return crc == 0xCBF43926u; });
  std::exit(all_right ? 0 : 1);
}

TEST(Crc32DeathTest, FirstCallsMayRace) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // executes the test program anew
  EXPECT_EXIT(first_calls_in_many_threads(), testing::ExitedWithCode(0), "");
}

// Every split of every message of up to 4096 bytes: 8.4 million of them.
TEST(Crc32CombineTest, EverySplitOfEveryLength) {
  const auto bytes = random_bytes(kLongestShort);
  std::vector<std::uint32_t> prefixes = {0};
  for (const unsigned char& byte : bytes) prefixes.push_back(zlib_crc32(prefixes.back(), &byte, 1));
  for (std::size_t split = 0; split <= kLongestShort; ++split) {
    std::uint32_t suffix = 0;
    for (std::size_t end = split;; ++end) {
      const std::uint32_t combined = crc32_combine(prefixes[split], suffix, end - split);
      if (combined != prefixes[end]) FAIL() << split << " of " << end << " bytes";
      if (end == kLongestShort) break;
      suffix = crc32(suffix, &bytes[end], 1);
    }
  }
}

TEST(Crc32CombineTest, LengthsAgainstZlib) {
  std::vector<std::uint64_t> lengths = {0, 3'000'000'000, 0x7FFF'FFFF'FFFF'FFFF};
  for (int bit = 0; bit < 63; ++bit) {
    const std::uint64_t power = std::uint64_t{1} << bit;
    lengths.insert(lengths.end(), {power - 1, power, power + 1});
  }
  for (const std::uint64_t nbytes : lengths) {
    for (const std::uint32_t crc_a : kInitials) {
      ASSERT_EQ(crc32_combine(crc_a, 0x0BADCAFE, nbytes), zlib_combine(crc_a, 0x0BADCAFE, nbytes))
          << nbytes;
    }
  }
}

// zlib's lengths are signed; beyond them, appending in two steps must equal appending in one.
TEST(Crc32CombineTest, LengthsBeyondZlib) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  for (const std::uint64_t nbytes : {kMost, kMost - 1, kMost / 2 + 1, kMost / 3 * 2}) {
    const std::uint64_t first = nbytes / 3;
    const std::uint32_t two_steps =
        zlib_combine(zlib_combine(0xDEADBEEF, 0, first), 0,  // two thirds do not fit either
                     (nbytes - first) / 2);
    const std::uint64_t rest = nbytes - first - (nbytes - first) / 2;
    ASSERT_EQ(crc32_combine(0xDEADBEEF, 5, nbytes), zlib_combine(two_steps, 5, rest)) << nbytes;
  }
}

TEST(Crc32CombineTest, PiecesInAnyGrouping) {
  const auto bytes = random_bytes(3000);
  const std::uint32_t a = crc32(0, bytes.data(), 1000);
  const std::uint32_t b = crc32(0, bytes.data() + 1000, 1);
  const std::uint32_t c = crc32(0, bytes.data() + 1001, 1999);
  const std::uint32_t whole = crc32(0, bytes.data(), bytes.size());
  EXPECT_EQ(crc32_combine(crc32_combine(a, b, 1), c, 1999), whole);
  EXPECT_EQ(crc32_combine(a, crc32_combine(b, c, 1999), 2000), whole);
}

}  // namespace
}  // namespace ptsave
