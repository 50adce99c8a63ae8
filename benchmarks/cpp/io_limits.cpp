// What the machine itself can do: the limits that ptsave's benchmarks are read against.
//
//   io_limits MODE PATH NBYTES THREADS...
//
// MODE is one of
//   direct-write    O_DIRECT writes of a fresh, preallocated file, then fdatasync
//   buffered-write  writes of a fresh, preallocated file into the page cache
//   tmpfs-write     the same without preallocation, which on tmpfs is a write of its own
//   direct-read     O_DIRECT reads of the file at PATH (dropped from the page cache first)
//   columns-read    O_DIRECT reads of 4 KiB out of each 32 KiB of that file
//   cached-read     reads of the cached file at PATH into fresh memory made of huge pages
//   resident-read   reads of the cached file at PATH into memory that is faulted in already, in the
//                   pages that an allocator's memory has
//   mapped-read     one byte of every page of the cached file at PATH, through a fresh mapping
//   copy            memcpy between memory as an allocator has it and huge pages, both faulted in;
//                   PATH is not looked at
//
// Writes move NBYTES of memory that was faulted in before; reads move the whole file.  Each mode
// runs once per thread count and prints {"nbytes": N, "seconds": {"1": S, ...}}.  What is timed
// starts with opening the file and ends when the last thread has finished; freeing memory is not
// timed.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunk = std::size_t{8} << 20;
constexpr std::size_t kColumnsStride = std::size_t{32} << 10;

constexpr std::size_t round_up(std::size_t nbytes, std::size_t unit) {
  return (nbytes + unit - 1) / unit * unit;
}

[[noreturn]] void throw_errno(const std::string& operation) {
  throw std::system_error(errno, std::generic_category(), operation);
}

// An open file descriptor.
class File {
 public:
  File(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (fd_ < 0) throw_errno("open " + path);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(fd_); }

  int fd() const { return fd_; }

  std::size_t nbytes() const {
    struct stat status{};
    if (::fstat(fd_, &status) != 0) throw_errno("fstat");
    return static_cast<std::size_t>(status.st_size);
  }

  // Filesystems that cannot preallocate are measured without it.
  void preallocate(std::size_t nbytes) const {
    if (::fallocate(fd_, 0, 0, static_cast<off_t>(nbytes)) != 0 && errno != EOPNOTSUPP)
      throw_errno("fallocate");
  }

  void sync_data() const {
    if (::fdatasync(fd_) != 0) throw_errno("fdatasync");
  }

  void drop_from_page_cache() const {
    if (::fsync(fd_) != 0) throw_errno("fsync");
    if (::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED) != 0) throw_errno("posix_fadvise");
  }

  void write_all(std::span<const std::byte> data, std::size_t offset) const {
    while (!data.empty()) {
      const ssize_t count = ::pwrite(fd_, data.data(), data.size(), static_cast<off_t>(offset));
      if (count < 0) throw_errno("pwrite");
      data = data.subspan(static_cast<std::size_t>(count));
      offset += static_cast<std::size_t>(count);
    }
  }

  // Stops early only at the end of the file.
  void read_all(std::span<std::byte> data, std::size_t offset) const {
    while (!data.empty()) {
      const ssize_t count = ::pread(fd_, data.data(), data.size(), static_cast<off_t>(offset));
      if (count < 0) throw_errno("pread");
      if (count == 0) return;
      data = data.subspan(static_cast<std::size_t>(count));
      offset += static_cast<std::size_t>(count);
    }
  }

 private:
  int fd_;
};

// A private mapping; anonymous ones are aligned to, and made of, huge pages where the kernel can.
class Memory {
 public:
  static Memory anonymous(std::size_t nbytes) {
    Memory memory(round_up(nbytes, kHugePage) + kHugePage, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    ::madvise(memory.mapping_, memory.mapped_nbytes_, MADV_HUGEPAGE);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.mapping_);
    memory.data_ += round_up(address, kHugePage) - address;
    return memory;
  }
  // As malloc() has it: small pages, unless the kernel makes huge ones without being asked.
  static Memory ordinary(std::size_t nbytes) { return {nbytes, MAP_PRIVATE | MAP_ANONYMOUS, -1}; }
  static Memory of_file(const File& file) { return {file.nbytes(), MAP_PRIVATE, file.fd()}; }

  Memory(Memory&& other) noexcept
      : mapping_(std::exchange(other.mapping_, nullptr)),
        mapped_nbytes_(other.mapped_nbytes_),
        data_(other.data_) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory& operator=(Memory&&) = delete;
  ~Memory() {
    if (mapping_ != nullptr) ::munmap(mapping_, mapped_nbytes_);
  }

  std::span<std::byte> at(std::size_t offset, std::size_t nbytes) const {
    return {data_ + offset, nbytes};
  }

 private:
  Memory(std::size_t nbytes, int flags, int fd)
      : mapping_(::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0)),
        mapped_nbytes_(nbytes) {
    if (mapping_ == MAP_FAILED) throw_errno("mmap");
    data_ = static_cast<std::byte*>(mapping_);
  }

  void* mapping_;
  std::size_t mapped_nbytes_;
  std::byte* data_ = nullptr;
};

struct Chunk {
  std::size_t worker;
  std::size_t offset;
  std::size_t nbytes;
};

// Calls move(chunk) for every chunk of [0, nbytes) from `threads` threads; rethrows the first
// error.
void for_each_chunk(std::size_t nbytes, std::size_t threads,
                    const std::function<void(const Chunk&)>& move) {
  std::atomic<std::size_t> cursor{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&](std::size_t worker) {
    try {
      for (std::size_t offset = cursor.fetch_add(kChunk); offset < nbytes;
           offset = cursor.fetch_add(kChunk))
        move({worker, offset, std::min(kChunk, nbytes - offset)});
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> crew;
    crew.reserve(threads);
    for (std::size_t worker = 0; worker < threads; ++worker) crew.emplace_back(work, worker);
  }
  if (error) std::rethrow_exception(error);
}

void fill(std::span<std::byte> data, std::uint64_t seed) {
  constexpr std::uint64_t kMultiplier = 6364136223846793005U;
  for (std::byte& value : data) {
    seed = seed * kMultiplier + 1;
    value = static_cast<std::byte>(seed >> 56U);
  }
}

// Faults memory in, with contents that no storage layer can compress or deduplicate.
Memory faulted(Memory memory, std::size_t nbytes) {
  for_each_chunk(nbytes, std::thread::hardware_concurrency(), [&](const Chunk& chunk) {
    fill(memory.at(chunk.offset, chunk.nbytes), chunk.offset);
  });
  return memory;
}

Memory faulted_memory(std::size_t nbytes) { return faulted(Memory::anonymous(nbytes), nbytes); }

// A virtual machine's free memory may have gone back to its host, and fetching it costs up to ten
// times what the measurement does.  What was touched and freed last is what the kernel hands out
// next.
void fetch_free_memory(std::size_t nbytes) {
  const Memory memory = Memory::anonymous(nbytes);
  for (std::size_t offset = 0; offset < nbytes; offset += kPage)
    memory.at(offset, 1).front() = std::byte{1};
}

double seconds_of(const std::function<void()>& action) {
  const auto start = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Measures one thread count.
using Measure = std::function<double(std::size_t threads)>;

enum class WriteKind { kDirect, kBuffered, kTmpfs };

Measure write_measure(const std::string& path, std::size_t nbytes, WriteKind kind) {
  const int open_flags = kind == WriteKind::kDirect ? O_DIRECT : 0;
  const auto source = std::make_shared<Memory>(faulted_memory(nbytes));
  return [=](std::size_t threads) {
    ::unlink(path.c_str());
    ::sync();
    fetch_free_memory(nbytes);
    const double seconds = seconds_of([&] {
      const File file(path, O_WRONLY | O_CREAT | O_EXCL | open_flags);
      if (kind != WriteKind::kTmpfs) file.preallocate(nbytes);
      for_each_chunk(nbytes, threads, [&](const Chunk& chunk) {
        file.write_all(source->at(chunk.offset, chunk.nbytes), chunk.offset);
      });
      if (kind == WriteKind::kDirect) file.sync_data();
    });
    ::unlink(path.c_str());
    return seconds;
  };
}

Measure direct_read_measure(const std::string& path, std::size_t nbytes) {
  return [=](std::size_t threads) {
    File(path, O_RDONLY).drop_from_page_cache();
    const Memory buffers = faulted_memory(threads * kChunk);
    return seconds_of([&] {
      const File file(path, O_RDONLY | O_DIRECT);
      for_each_chunk(nbytes, threads, [&](const Chunk& chunk) {
        const std::size_t aligned_nbytes = round_up(chunk.nbytes, kPage);
        file.read_all(buffers.at(chunk.worker * kChunk, aligned_nbytes), chunk.offset);
      });
    });
  };
}

Measure columns_read_measure(const std::string& path, std::size_t nbytes) {
  return [=](std::size_t threads) {
    File(path, O_RDONLY).drop_from_page_cache();
    const Memory buffers = faulted_memory(threads * kPage);
    return seconds_of([&] {
      const File file(path, O_RDONLY | O_DIRECT);
      for_each_chunk(nbytes, threads, [&](const Chunk& chunk) {
        for (std::size_t at = 0; at + kPage <= chunk.nbytes; at += kColumnsStride)
          file.read_all(buffers.at(chunk.worker * kPage, kPage), chunk.offset + at);
      });
    });
  };
}

Measure cached_read_measure(const std::string& path, std::size_t nbytes) {
  return [=](std::size_t threads) {
    std::vector<Memory> kept;  // outlives the timing
    fetch_free_memory(nbytes);
    return seconds_of([&] {
      const File file(path, O_RDONLY);
      const Memory& memory = kept.emplace_back(Memory::anonymous(nbytes));
      for_each_chunk(nbytes, threads, [&](const Chunk& chunk) {
        file.read_all(memory.at(chunk.offset, chunk.nbytes), chunk.offset);
      });
    });
  };
}

Measure resident_read_measure(const std::string& path, std::size_t nbytes) {
  const auto memory = std::make_shared<Memory>(faulted(Memory::ordinary(nbytes), nbytes));
  return [=](std::size_t threads) {
    return seconds_of([&] {
      const File file(path, O_RDONLY);
      for_each_chunk(nbytes, threads, [&](const Chunk& chunk) {
        file.read_all(memory->at(chunk.offset, chunk.nbytes), chunk.offset);
      });
    });
  };
}

Measure mapped_read_measure(const std::string& path, std::size_t nbytes) {
  return [=](std::size_t threads) {
    std::vector<Memory> kept;  // outlives the timing
    std::atomic<std::size_t> sum{0};
    return seconds_of([&] {
      const File file(path, O_RDONLY);
      const Memory& memory = kept.emplace_back(Memory::of_file(file));
      for_each_chunk(nbytes, threads, [&](const Chunk& chunk) {
        const std::span<std::byte> data = memory.at(chunk.offset, chunk.nbytes);
        std::size_t chunk_sum = 0;
        for (std::size_t i = 0; i < data.size(); i += kPage)
          chunk_sum += std::to_integer<std::size_t>(data[i]);
        sum += chunk_sum;
      });
    });
  };
}

Measure copy_measure(std::size_t nbytes) {
  const auto source = std::make_shared<Memory>(faulted(Memory::ordinary(nbytes), nbytes));
  const auto target = std::make_shared<Memory>(faulted_memory(nbytes));
  return [=](std::size_t threads) {
    return seconds_of([&] {
      for_each_chunk(nbytes, threads, [&](const Chunk& chunk) {
        std::ranges::copy(source->at(chunk.offset, chunk.nbytes),
                          target->at(chunk.offset, chunk.nbytes).begin());
      });
    });
  };
}

Measure measure_of(std::string_view mode, const std::string& path, std::size_t nbytes) {
  if (mode == "direct-write")
    return write_measure(path, round_up(nbytes, kPage), WriteKind::kDirect);
  if (mode == "buffered-write") return write_measure(path, nbytes, WriteKind::kBuffered);
  if (mode == "tmpfs-write") return write_measure(path, nbytes, WriteKind::kTmpfs);
  if (mode == "direct-read") return direct_read_measure(path, nbytes);
  if (mode == "columns-read") return columns_read_measure(path, nbytes);
  if (mode == "cached-read") return cached_read_measure(path, nbytes);
  if (mode == "resident-read") return resident_read_measure(path, nbytes);
  if (mode == "mapped-read") return mapped_read_measure(path, nbytes);
  if (mode == "copy") return copy_measure(nbytes);
  throw std::invalid_argument("unknown mode: " + std::string(mode));
}

void run(std::string_view mode, const std::string& path, std::size_t nbytes,
         std::span<const std::string> thread_counts) {
  if (mode.ends_with("-read")) nbytes = File(path, O_RDONLY).nbytes();
  const Measure measure = measure_of(mode, path, nbytes);
  std::string separator;
  std::cout << R"({"nbytes": )" << nbytes << R"(, "seconds": {)";
  for (const std::string& threads : thread_counts) {
    std::cout << separator << '"' << threads << R"(": )" << measure(std::stoul(threads));
    separator = ", ";
  }
  std::cout << "}}\n";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    if (arguments.size() < 4)
      throw std::invalid_argument("usage: io_limits MODE PATH NBYTES THREADS...");
    run(arguments[0], arguments[1], std::stoul(arguments[2]), std::span(arguments).subspan(3));
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "io_limits: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
