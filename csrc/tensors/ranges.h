// Parts of files and tensors: mapped without reading, or read into existing tensors, on the host or
// on accelerators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/crc/crc32.h"
#include "core/io/file.h"
#include "core/io/ranges.h"
#include "core/memory/pages.h"
#include "core/pipeline/pipeline.h"
#include "core/read/reader.h"
#include "device/accelerator_copies.h"
#include "device/side_streams.h"

namespace ptsave {

// A tensor whose bytes come from the file when they are accessed; writes change a copy in memory.
// The file may be closed.  If it is truncated while the tensor lives, access to the missing bytes
// kills the process.  Throws IoError (errno 0 beyond the end).
inline at::Tensor map_range(const File& file, std::uint64_t offset, std::uint64_t nbytes) {
  const std::uint64_t file_nbytes = file.nbytes();
  if (offset > file_nbytes || nbytes > file_nbytes - offset) {
    throw IoError(0, "map (beyond the end)", file.path());
  }
  const auto options = at::TensorOptions(at::kByte).device(at::kCPU);
  const auto numel = static_cast<std::int64_t>(nbytes);
  if (nbytes == 0) return at::empty({0}, options);
  const PageRange pages = pages_covering(offset, offset + nbytes, page_nbytes());
  const auto mapped_nbytes = static_cast<std::size_t>(pages.nbytes());
  // MAP_NORESERVE: no memory for copies of written pages, because files may be larger than memory.
  void* memory = ::mmap(nullptr, mapped_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                        file.fd(), static_cast<off_t>(pages.begin));
  if (memory == MAP_FAILED) throw IoError(errno, "mmap", file.path());
  return at::from_blob(
      static_cast<std::byte*>(memory) + (offset - pages.begin), {numel},
      [memory, mapped_nbytes](void*) { ::munmap(memory, mapped_nbytes); }, options);
}

// The mapping that holds a storage of map_range().
inline std::span<std::byte> pages_of(const c10::Storage& storage) {
  auto* const data = static_cast<std::byte*>(storage.mutable_data());
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const PageRange pages = pages_covering(address, address + storage.nbytes(), page_nbytes());
  return {data - (address - pages.begin), static_cast<std::size_t>(pages.nbytes())};
}

// Replaces the memory of a mapped tensor's storage by a copy at the same address, which is
// independent of the file.  No thread may write to it meanwhile.  Throws IoError.
inline void detach_from_file(const c10::Storage& storage, const std::string& name) {
  const std::span<std::byte> pages = pages_of(storage);
  void* copy =
      ::mmap(nullptr, pages.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) throw std::bad_alloc();
  std::memcpy(copy, pages.data(), pages.size());
  if (::mremap(copy, pages.size(), pages.size(), MREMAP_MAYMOVE | MREMAP_FIXED, pages.data()) ==
      MAP_FAILED) {
    const int errnum = errno;
    ::munmap(copy, pages.size());
    throw IoError(errnum, "mremap", name);
  }
}

// The CRC-32 of memory, by several threads.
inline std::uint32_t crc32_of(std::span<const std::byte> memory, std::size_t n_threads,
                              const Poll& poll) {
  constexpr std::size_t kPieceNbytes = std::size_t{1} << 20;
  std::vector<std::uint32_t> crcs((memory.size() + kPieceNbytes - 1) / kPieceNbytes);
  const auto piece = [&](std::size_t i) {
    return memory.subspan(i * kPieceNbytes)
        .first(std::min(kPieceNbytes, memory.size() - i * kPieceNbytes));
  };
  run_chunks(
      crcs.size(), n_threads,
      [&](std::size_t i) { crcs[i] = crc32(0, piece(i).data(), piece(i).size()); }, poll);
  std::uint32_t crc = 0;
  for (std::size_t i = 0; i < crcs.size(); ++i) crc = crc32_combine(crc, crcs[i], piece(i).size());
  return crc;
}

// A block for resharding.  Describes where a CPU tensor's elements are in a file: the first is at
// `offset`, and strides are in bytes.
struct TensorBox {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::vector<std::uint64_t> strides;
  at::Tensor target;
};

// Adds the runs of bytes that are contiguous in both file and target.  Throws std::invalid_argument
// unless there is one stride for each dimension.
inline void add_ranges(const TensorBox& box, std::vector<FileRange>& ranges) {
  const at::Tensor& target = box.target;
  const auto sizes = target.sizes();
  if (box.strides.size() != sizes.size()) throw std::invalid_argument("not one stride per axis");
  if (target.numel() == 0) return;
  const auto itemsize = static_cast<std::uint64_t>(target.element_size());
  const auto place_stride = [&](std::size_t d) {
    return static_cast<std::int64_t>(itemsize) * target.stride(static_cast<std::int64_t>(d));
  };
  std::uint64_t run = itemsize;
  std::size_t n_outer = sizes.size();
  for (; n_outer > 0; --n_outer) {
    const std::size_t d = n_outer - 1;
    const bool is_packed =
        box.strides[d] == run && place_stride(d) == static_cast<std::int64_t>(run);
    if (sizes[d] != 1 && !is_packed) break;
    run *= static_cast<std::uint64_t>(sizes[d]);
  }
  std::uint64_t offset = box.offset;
  auto* place = static_cast<std::byte*>(target.mutable_data_ptr());
  std::vector<std::int64_t> index(n_outer);
  for (;;) {
    ranges.push_back({box.file, offset, run, place});
    std::size_t d = n_outer;
    for (; d > 0; --d) {
      const std::size_t k = d - 1;
      offset += box.strides[k];
      place += place_stride(k);
      if (++index[k] < sizes[k]) break;
      offset -= box.strides[k] * static_cast<std::uint64_t>(index[k]);
      place -= place_stride(k) * index[k];
      index[k] = 0;
    }
    if (d == 0) return;
  }
}

// The part of a file from `offset` on with all bytes of a contiguous tensor, in CPU memory or on a
// device that SideStreams supports.
struct TensorRange {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  at::Tensor target;
  std::optional<std::uint32_t> crc = std::nullopt;  // the expected one
};

// One read of many ranges.  Not safe for concurrent use, except nbytes_read().
class RangeTargets {
 public:
  // Throws as RangeRead does.
  RangeTargets(std::shared_ptr<RangeFiles> files, const std::vector<TensorRange>& ranges,
               std::uint64_t max_gap = RangeList::kMaxGapNbytes)
      : read_(std::move(files), file_ranges(ranges), max_gap) {}

  // Returns when all bytes are in their tensors.  Bytes for accelerators go through at most
  // `max_pinned_nbytes` of page-locked memory, and arrive after the work that is now queued on this
  // thread's current streams.  Throws IoError, at::Error.
  void run(std::size_t n_threads, std::size_t max_pinned_nbytes, const Poll& poll) {
    if (targets_.empty()) return read_.run(n_threads, poll);
    AcceleratorUnstager unstager(targets_, RangeRead::kLeaseNbytes, n_threads, max_pinned_nbytes);
    read_.run(unstager.n_workers(), poll, &unstager);
  }
  std::uint64_t nbytes_read() const { return read_.nbytes_read(); }
  // The ranges that do not have their expected CRCs; call after run().
  std::vector<FileRange> damaged() const { return read_.damaged(); }

 private:
  std::vector<FileRange> file_ranges(const std::vector<TensorRange>& ranges) {
    std::vector<FileRange> result;
    result.reserve(ranges.size());
    for (const auto& [file, offset, target, crc] : ranges) {
      const std::uint64_t nbytes = target.nbytes();
      if (target.is_cpu()) {
        auto* const place = static_cast<std::byte*>(target.mutable_data_ptr());
        result.push_back({file, offset, nbytes, place, std::nullopt, crc});
      } else {
        result.push_back({file, offset, nbytes, nullptr, targets_.size(), crc});
        targets_.push_back(bytes_of(target, 0, nbytes));
      }
    }
    return result;
  }

  std::vector<at::Tensor> targets_;  // on accelerators
  RangeRead read_;
};

// With fewer bytes, threads and streams cost more than they save.
inline constexpr std::uint64_t kMinPinnedNbytes = std::uint64_t{1} << 20;

// A contiguous tensor in CPU memory, and a contiguous tensor of as many bytes on an accelerator.
//
// copy_to_accelerators() copies the bytes as RangeTargets::run() does: neighbours cross the bus
// together.  Throws std::invalid_argument if sources overlap.
struct ToAccelerator {
  at::Tensor source;
  at::Tensor target;
};

inline const std::byte* begin_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

inline void copy_to_accelerators(const std::vector<ToAccelerator>& copies, std::size_t n_threads,
                                 std::size_t max_pinned_nbytes, const Poll& poll) {
  if (copies.empty()) return;
  // Treat all memory between the sources as one file; the gaps are not read.
  const std::byte* begin = begin_of(copies.front().source);
  const std::byte* end = begin;
  for (const ToAccelerator& copy : copies) {
    begin = std::min(begin, begin_of(copy.source));
    end = std::max(end, begin_of(copy.source) + copy.source.nbytes());
  }
  std::vector<ByteSource> memory;
  memory.emplace_back(begin, static_cast<std::uint64_t>(end - begin), "memory");
  std::vector<TensorRange> ranges;
  ranges.reserve(copies.size());
  for (const ToAccelerator& copy : copies) {
    ranges.push_back({0, static_cast<std::uint64_t>(begin_of(copy.source) - begin), copy.target});
  }
  RangeTargets(std::make_shared<RangeFiles>(std::move(memory)), ranges)
      .run(n_threads, max_pinned_nbytes, poll);
}

inline std::span<std::byte> memory_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// Returns the tensors on accelerators as bytes, and sets their numbers in the destinations.
inline std::vector<at::Tensor> accelerator_targets(std::vector<Destination>& destinations,
                                                   std::span<const at::Tensor> tensors) {
  std::vector<at::Tensor> targets;
  auto destination = destinations.begin();  // empty tensors have none
  for (const at::Tensor& tensor : tensors) {
    if (tensor.nbytes() == 0) continue;
    if (!tensor.is_cpu()) {
      destination->target = targets.size();
      targets.push_back(bytes_of(tensor, 0, tensor.nbytes()));
    }
    ++destination;
  }
  return targets;
}

// Reads records[k] into targets[k], which is contiguous and in CPU memory or on a device that
// SideStreams supports.  No record may occur twice.  Without targets, only checks the records.
// Returns damaged records in file order.  Bytes for accelerators go through at most
// `max_pinned_nbytes` of page-locked memory, and arrive after the work that is now queued on this
// thread's current streams.  Throws std::invalid_argument if sizes differ; IoError, FormatError,
// at::Error.
inline std::vector<DamagedRecord> read_records(const ArchiveReader& reader,
                                               const std::vector<std::size_t>& records,
                                               std::span<const at::Tensor> targets,
                                               std::size_t n_threads, bool verify,
                                               std::size_t max_pinned_nbytes, const Poll& poll) {
  std::vector<std::span<std::byte>> memory;
  memory.reserve(targets.size());
  for (const at::Tensor& target : targets) memory.push_back(memory_of(target));
  std::vector<Destination> destinations = whole_payloads(reader.index(), records, memory);
  std::vector<at::Tensor> on_accelerators = accelerator_targets(destinations, targets);
  if (on_accelerators.empty()) {
    return reader.read_records(records, destinations, n_threads, verify, poll);
  }
  AcceleratorUnstager unstager(std::move(on_accelerators), kMaxChunkNbytes, n_threads,
                               max_pinned_nbytes);
  std::vector<DamagedRecord> damaged =
      reader.read_records(records, destinations, unstager.n_workers(), verify, poll, &unstager);
  unstager.drain();
  return damaged;
}

// Reads parts of an archive, which is file 0, unchecked.  Parts for accelerators must not overlap.
// Throws IoError, at::Error.
inline void read_ranges(const ArchiveReader& reader, const std::vector<TensorRange>& ranges,
                        std::size_t n_threads, std::size_t max_pinned_nbytes, const Poll& poll) {
  std::vector<TensorRange> on_accelerators;
  for (const TensorRange& range : ranges) {
    if (range.target.is_cpu()) {
      const std::span<std::byte> memory = memory_of(range.target);
      reader.read_range(range.offset, memory.data(), memory.size(), n_threads, poll);
    } else {
      on_accelerators.push_back(range);
    }
  }
  if (on_accelerators.empty()) return;
  auto files = std::make_shared<RangeFiles>(std::span(&reader.source(), 1), n_threads);
  RangeTargets(std::move(files), on_accelerators).run(n_threads, max_pinned_nbytes, poll);
}

}  // namespace ptsave
