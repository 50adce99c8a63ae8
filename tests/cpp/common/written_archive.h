// Archives that are written to every target, and what has to be in them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/archive_fixture.h"
#include "common/scratch.h"
#include "core/io/file.h"
#include "core/write/writer.h"

namespace ptsave {

// The writers of core, for an archive's layout and payloads.
inline ArchiveBody body_of(const ArchiveLayout& layout, const Payloads& payloads,
                           const WriteOptions& options, std::size_t chunk_nbytes) {
  return {layout, payloads, options.stager, options.compute_crcs, chunk_nbytes};
}
inline void write_to_memory(const ArchiveLayout& layout, const Payloads& payloads, std::byte* out,
                            const WriteOptions& options, Progress& progress, const Poll& poll) {
  ArchiveBody body = body_of(layout, payloads, options, options.chunk_nbytes);
  write_to_memory(body, out, options, progress, poll);
}
inline void write_to_stream(const ArchiveLayout& layout, const Payloads& payloads,
                            const StreamSink& sink, const WriteOptions& options,
                            Progress& progress) {
  ArchiveBody body = body_of(layout, payloads, options, options.chunk_nbytes);
  write_to_stream(body, sink, options, progress);
}
inline void write_buffered(const ArchiveLayout& layout, const Payloads& payloads, File& file,
                           std::uint64_t base_offset, WriteOptions options, Progress& progress,
                           const Poll& poll) {
  options.direct_nbytes.reset();
  ArchiveBody body = body_of(layout, payloads, options, options.chunk_nbytes);
  write_to_file(body, file, base_offset, options, progress, poll);
}
inline void write_direct(const ArchiveLayout& layout, const Payloads& payloads, File& file,
                         const WriteOptions& options, Progress& progress, const Poll& poll) {
  ArchiveBody body = body_of(layout, payloads, options, direct_chunk_nbytes(file, options));
  write_direct(body, file, 0, options, progress, poll);
}

}  // namespace ptsave

namespace ptsave::written_archive {

using archive_fixture::bytes_of;
using archive_fixture::central_directory;
using archive_fixture::crc_of;
using archive_fixture::hash_of;
using scratch::Folder;
using scratch::noise;

inline const Poll kNoPoll = [] {};
inline constexpr std::size_t kChunk = 4096;  // cuts records everywhere
inline constexpr std::size_t kIdNbytes = 40;

struct Entry {
  std::string name;
  std::string data;
  bool hole = false;
};

// The archive built the slow, obvious way: one record after the other, zlib's CRC.
inline std::string reference(const std::vector<Entry>& entries, std::uint64_t alignment = 64,
                             bool with_crcs = true) {
  std::vector<RecordSpec> specs;
  std::vector<std::uint32_t> crcs;
  std::vector<std::uint32_t> folded;
  std::vector<std::string> names;
  std::vector<std::string> payloads;
  for (const Entry& entry : entries) {
    specs.push_back({entry.name, entry.data.size()});
    names.push_back(entry.name);
    payloads.push_back(entry.hole ? std::string(entry.data.size(), '\0') : entry.data);
    crcs.push_back(with_crcs && !entry.hole ? crc_of(entry.data) : 0);
    if (entry.data.empty()) continue;
    const auto front = std::as_bytes(std::span(payloads.back()));
    if (const auto extra = descriptor_lookalike(front)) folded.push_back(*extra);
    folded.push_back(crcs.back());
  }
  payloads.push_back(serialization_id(hash_of(names), folded));
  crcs.push_back(with_crcs ? crc_of(payloads.back()) : 0);
  specs.push_back({".data/serialization_id", kIdNbytes});
  const ArchiveLayout layout = plan("archive", specs, alignment);
  std::string file(layout.central_directory_offset(), '\0');
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const RecordLayout& at = layout.record(i);
    layout.local_header(i, bytes_of(file).data() + at.header_offset);
    file.replace(at.payload_offset, at.nbytes, payloads[i]);
    layout.data_descriptor(i, crcs[i], bytes_of(file).data() + at.payload_end());
  }
  return file + central_directory(layout, crcs);
}

enum class Target { kMemory, kStream, kBuffered, kBufferedAtOffset, kDirect };
inline constexpr Target kTargets[] = {Target::kMemory, Target::kStream, Target::kBuffered,
                                      Target::kBufferedAtOffset, Target::kDirect};

inline std::string write_to_string(const ArchiveLayout& layout, const Payloads& payloads,
                                   const WriteOptions& options, Progress& progress) {
  std::string bytes(layout.nbytes(), '\xAA');
  write_to_memory(layout, payloads, bytes_of(bytes).data(), options, progress, kNoPoll);
  return bytes;
}

inline std::string collect_stream(const ArchiveLayout& layout, const Payloads& payloads,
                                  const WriteOptions& options, Progress& progress) {
  std::string bytes;
  const StreamSink sink = [&](const std::byte* data, std::uint64_t nbytes) {
    EXPECT_GT(nbytes, 0u);
    if (data == nullptr) {
      bytes.append(nbytes, '\0');
    } else {
      bytes.append(reinterpret_cast<const char*>(data), nbytes);
    }
  };
  write_to_stream(layout, payloads, sink, options, progress);
  return bytes;
}

// So many of the first bytes past the page cache; 0: all through it.
inline WriteOptions with_direct(WriteOptions options, std::uint64_t nbytes) {
  options.n_direct_threads = 2 * options.n_threads;
  if (nbytes > 0) options.direct_nbytes = nbytes;
  return options;
}

inline std::string write_to_file(Target target, const std::string& folder,
                                 const ArchiveLayout& layout, const Payloads& payloads,
                                 const WriteOptions& options, Progress& progress) {
  constexpr std::uint64_t kOffset = 12345;
  const std::uint64_t offset = target == Target::kBufferedAtOffset ? kOffset : 0;
  AtomicFile file(folder + "/file", "file");
  if (target == Target::kDirect) {
    write_direct(layout, payloads, file.file(), options, progress, kNoPoll);
  } else {
    write_buffered(layout, payloads, file.file(), offset, options, progress, kNoPoll);
  }
  file.commit(false);
  const std::string bytes = scratch::read_file(folder + "/file");
  EXPECT_EQ(bytes.substr(0, offset), std::string(offset, '\0'));
  return bytes.substr(offset);
}

class Scenario {
 public:
  explicit Scenario(std::vector<Entry> entries, std::uint64_t alignment = 64)
      : entries_(std::move(entries)), alignment_(alignment) {
    std::vector<RecordSpec> specs;
    specs.reserve(entries_.size() + 1);
    for (const Entry& entry : entries_) specs.push_back({entry.name, entry.data.size()});
    specs.push_back({".data/serialization_id", kIdNbytes});
    layout_ = plan("archive", specs, alignment);
    payloads_ = [this](std::size_t i) -> const std::byte* {
      EXPECT_LT(i, entries_.size()) << "the serialization id is computed";
      if (entries_[i].hole) return nullptr;
      EXPECT_FALSE(entries_[i].data.empty()) << "asked for an empty payload";
      return std::as_bytes(std::span(entries_[i].data)).data();
    };
  }

  const ArchiveLayout& layout() const { return layout_; }
  const Payloads& payloads() const { return payloads_; }

  std::string write(Target target, const WriteOptions& options) const {
    Progress progress{0};
    std::string bytes;
    if (target == Target::kMemory) {
      bytes = write_to_string(layout_, payloads_, options, progress);
    } else if (target == Target::kStream) {
      bytes = collect_stream(layout_, payloads_, options, progress);
    } else {
      bytes = write_to_file(target, folder_.path(), layout_, payloads_, options, progress);
    }
    EXPECT_EQ(progress, layout_.nbytes());
    return bytes;
  }

  // Every target yields the reference's bytes, with and without threads, with and without CRCs.
  void check(std::size_t chunk_nbytes = kChunk) const {
    for (const bool compute_crcs : {true, false}) {
      const std::string expected = reference(entries_, alignment_, compute_crcs);
      for (const Target target : kTargets) {
        for (const std::size_t n_threads : {0u, 1u, 3u}) {
          const std::string bytes = write(target, {compute_crcs, n_threads, chunk_nbytes});
          ASSERT_TRUE(bytes == expected)
              << "target " << static_cast<int>(target) << ", threads " << n_threads << ", crcs "
              << compute_crcs << ", first difference at "
              << std::ranges::mismatch(bytes, expected).in1 - bytes.begin() << " of "
              << expected.size() << " (" << bytes.size() << ")";
        }
      }
    }
  }

 private:
  std::vector<Entry> entries_;
  std::uint64_t alignment_;
  ArchiveLayout layout_;
  Payloads payloads_;
  Folder folder_;
};

inline std::vector<Entry> entries_of(const std::vector<std::size_t>& sizes) {
  std::vector<Entry> entries;
  entries.reserve(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    entries.push_back({"data/" + std::to_string(i), noise(sizes[i], i + 1)});
  }
  return entries;
}

}  // namespace ptsave::written_archive
