// CRC-32 side by side: every kernel of this CPU, libdeflate, zlib, and a plain read of the same
// bytes as the limit that memory sets.  Prints a markdown table: median GB/s, spread, ratio to
// libdeflate.
//
// Contenders alternate within each round, so a slow phase of a shared machine hits all of them; the
// ratio is the median of the rounds' ratios.  Usage: crc32_benchmark [rounds=9] [large_mib=1024]
#include <libdeflate.h>
#include <sys/mman.h>
#include <zlib.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/crc/crc32.h"

namespace {

using Checksum = std::uint32_t (*)(std::uint32_t crc, const void* data, std::size_t nbytes);
using Copy = std::uint32_t (*)(std::uint32_t crc, void* dst, const void* src, std::size_t nbytes);

// One of `checksum` and `copy` is set.
struct Contender {
  std::string name;
  Checksum checksum;
  Copy copy = nullptr;
  bool is_crc = true;  // false: a limit, whose result means nothing
};

struct Workload {
  std::string name;
  std::size_t nbytes_per_call;
  std::size_t nbytes_per_thread;  // the memory that the calls go through
  std::size_t n_passes;
  std::size_t n_threads;
  std::size_t target_nbytes = 0;  // what each thread's copies go round in
};

// An anonymous mapping in huge pages, as the loader's destinations are.
class Memory {
 public:
  explicit Memory(std::size_t nbytes) : nbytes_(nbytes) {
    void* const mapped =
        mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    data_ = static_cast<unsigned char*>(mapped);
    madvise(data_, nbytes, MADV_HUGEPAGE);
    std::mt19937_64 generator(1);
    for (std::size_t offset = 0; offset + 8 <= nbytes; offset += 8) {
      const std::uint64_t word = generator();
      std::memcpy(data_ + offset, &word, sizeof(word));
    }
  }
  ~Memory() { munmap(data_, nbytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  unsigned char* data() const { return data_; }

 private:
  unsigned char* data_;
  std::size_t nbytes_;
};

std::uint32_t libdeflate_checksum(std::uint32_t crc, const void* data, std::size_t nbytes) {
  return libdeflate_crc32(crc, data, nbytes);
}

std::uint32_t zlib_checksum(std::uint32_t crc, const void* data, std::size_t nbytes) {
  return static_cast<std::uint32_t>(::crc32_z(crc, static_cast<const Bytef*>(data), nbytes));
}

// As little arithmetic per byte as possible, and a prefetch for each cache line.
std::uint32_t plain_read(std::uint32_t crc, const void* data, std::size_t nbytes) {
  using Line = std::uint64_t __attribute__((vector_size(64), may_alias, aligned(1)));
  constexpr std::size_t kPrefetchLines = 40;
  const auto* lines = static_cast<const Line*>(data);
  Line sum = {};
  for (std::size_t i = 0; i < nbytes / sizeof(Line); ++i) {
    __builtin_prefetch(lines + i + kPrefetchLines);
    sum ^= lines[i];
  }
  return crc ^ static_cast<std::uint32_t>(sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^
                                          sum[6] ^ sum[7]);
}

std::uint32_t plain_copy(std::uint32_t crc, void* dst, const void* src, std::size_t nbytes) {
  std::memcpy(dst, src, nbytes);
  return crc;
}

// In pieces, so that the checksum finds the bytes in cache.
template <Checksum Update>
std::uint32_t copy_then_checksum(std::uint32_t crc, void* dst, const void* src,
                                 std::size_t nbytes) {
  constexpr std::size_t kPieceNbytes = std::size_t{64} << 10;
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  for (std::size_t offset = 0; offset < nbytes; offset += kPieceNbytes) {
    const std::size_t piece = std::min(kPieceNbytes, nbytes - offset);
    std::memcpy(to + offset, from + offset, piece);
    crc = Update(crc, to + offset, piece);
  }
  return crc;
}

std::vector<Contender> checksum_contenders() {
  std::vector<Contender> all = {{"libdeflate", libdeflate_checksum},
                                {"**ptsave::crc32**", ptsave::crc32}};
  for (const ptsave::Crc32Kernel& kernel : ptsave::crc32_kernels()) {
    if (kernel.supported()) all.push_back({"kernel " + std::string(kernel.name), kernel.update});
  }
  all.push_back({"zlib", zlib_checksum});
  all.push_back({"(plain read)", plain_read, nullptr, false});
  return all;
}

std::vector<Contender> copy_contenders() {
  return {{"memcpy, then libdeflate", nullptr, copy_then_checksum<libdeflate_checksum>},
          {"memcpy, then ptsave::crc32", nullptr, copy_then_checksum<ptsave::crc32>},
          {"**ptsave::crc32_copy**", nullptr, ptsave::crc32_copy},
          {"kernel portable", nullptr, ptsave::crc32_kernels().front().copy},
          {"(memcpy alone)", nullptr, plain_copy, false}};
}

std::uint32_t run_calls(const Workload& workload, const Contender& contender,
                        const unsigned char* data, unsigned char* target) {
  const std::size_t step = workload.nbytes_per_call;
  std::uint32_t crc = 0;
  for (std::size_t pass = 0; pass < workload.n_passes; ++pass) {
    for (std::size_t offset = 0; offset < workload.nbytes_per_thread; offset += step) {
      crc = contender.copy != nullptr
                ? contender.copy(crc, target + offset % workload.target_nbytes, data + offset, step)
                : contender.checksum(crc, data + offset, step);
    }
  }
  return crc;
}

// GB/s of all threads together, and the first thread's result.
double measure(const Workload& workload, const Contender& contender, const unsigned char* data,
               unsigned char* target, std::uint32_t* result) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::uint32_t> results(workload.n_threads);
  std::vector<std::thread> threads;
  const auto run_thread = [&](std::size_t i) {
    results[i] = run_calls(workload, contender, data + i * workload.nbytes_per_thread,
                           target + i * workload.target_nbytes);
  };
  for (std::size_t i = 1; i < workload.n_threads; ++i) threads.emplace_back(run_thread, i);
  run_thread(0);
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  *result = results[0];
  return static_cast<double>(workload.nbytes_per_thread * workload.n_passes * workload.n_threads) /
         elapsed.count() / 1e9;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 != 0 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// The first contender is what the others are compared with.
void compare(const Workload& workload, const std::vector<Contender>& all, const unsigned char* data,
             unsigned char* target, std::size_t n_rounds) {
  std::vector<std::vector<double>> rates(all.size());
  std::vector<std::vector<double>> ratios(all.size());
  std::uint32_t expected = 0;
  for (std::size_t round = 0; round <= n_rounds; ++round) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::uint32_t result = 0;
      const double rate = measure(workload, all[i], data, target, &result);
      if (i == 0) expected = result;
      if (all[i].is_crc && result != expected) {
        std::fprintf(stderr, "%s differs from libdeflate\n", all[i].name.c_str());
        std::exit(1);
      }
      if (round == 0) continue;  // warm-up
      rates[i].push_back(rate);
      ratios[i].push_back(rate / rates[0].back());
    }
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto [lowest, highest] = std::minmax_element(rates[i].begin(), rates[i].end());
    std::printf("| %s | %zu | %s | %.2f | %.2f – %.2f | %.2f |\n", workload.name.c_str(),
                workload.n_threads, all[i].name.c_str(), median(rates[i]), *lowest, *highest,
                median(ratios[i]));
  }
  std::fflush(stdout);
}

void compare_checksums(const Memory& source, std::size_t large, std::size_t n_rounds) {
  constexpr std::size_t kCached = std::size_t{256} << 10;
  const auto run = [&](const Workload& workload) {
    compare(workload, checksum_contenders(), source.data(), nullptr, n_rounds);
  };
  for (const std::size_t nbytes : {8u, 64u, 512u, 4096u}) {
    run({std::to_string(nbytes) + " B, in cache", nbytes, 16384, 1000, 1});
  }
  for (const std::size_t n_threads : {1u, 2u}) {
    run({"256 KiB, in cache", kCached, kCached, 512, n_threads});
  }
  for (const std::size_t n_threads : {1u, 2u}) {
    const std::size_t share = large / n_threads;
    run({std::to_string(large >> 20) + " MiB, from memory", share, share, 1, n_threads});
  }
}

void compare_copies(const Memory& source, std::size_t large, std::size_t n_rounds) {
  constexpr std::size_t kPiece = std::size_t{256} << 10;
  constexpr std::size_t kBounce = std::size_t{4} << 20;
  const Memory target(large);
  for (const std::size_t n_threads : {1u, 2u}) {
    const std::size_t share = large / n_threads;
    compare({"copy to a 4 MiB bounce buffer", kPiece, share, 1, n_threads, kBounce},
            copy_contenders(), source.data(), target.data(), n_rounds);
    compare({"copy to large memory", kPiece, share, 1, n_threads, share}, copy_contenders(),
            source.data(), target.data(), n_rounds);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t n_rounds = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 9;
  const std::size_t large = (argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1024) << 20;
  if (n_rounds == 0 || large < std::size_t{64} << 20) {
    std::fprintf(stderr, "usage: crc32_benchmark [rounds >= 1] [large_mib >= 64]\n");
    return 2;
  }
  const Memory source(large);
  std::printf("active kernel: %s; medians of %zu rounds\n\n", ptsave::crc32_active_kernel().name,
              n_rounds);
  std::printf("| workload | threads | contender | GB/s | spread | ratio to libdeflate |\n");
  std::printf("|---|---|---|---|---|---|\n");
  compare_checksums(source, large, n_rounds);
  compare_copies(source, large, n_rounds);
  return 0;
}
