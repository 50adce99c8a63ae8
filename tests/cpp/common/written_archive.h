// Archives that are written to every target, and what has to be in them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/archives.h"
#include "core/io/file.h"
#include "core/write/writer.h"

namespace ptsave::common {

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

inline constexpr std::size_t kChunk = 4096;  // cuts records everywhere
inline constexpr std::size_t kIdNbytes = 40;

// The archive that torch writes for these records: with a serialization id behind them.
inline std::string reference(std::vector<Record> records, std::uint64_t alignment = 64,
                             bool with_crcs = true) {
  std::vector<std::string> names;
  std::vector<std::uint32_t> folded;
  for (const Record& record : records) {
    names.push_back(record.name);
    if (record.data.empty()) continue;
    std::string payload = record.hole ? std::string(record.data.size(), '\0') : record.data;
    if (const auto extra = descriptor_lookalike(bytes_of(payload))) folded.push_back(*extra);
    folded.push_back(with_crcs && !record.hole ? crc_of(record.data) : 0);
  }
  records.push_back({".data/serialization_id", serialization_id(hash_of(names), folded)});
  return archive(records, alignment, "archive", with_crcs);
}

enum class Target { kMemory, kStream, kBuffered, kBufferedAtOffset, kDirect };
inline constexpr Target kTargets[] = {Target::kMemory, Target::kStream, Target::kBuffered,
                                      Target::kBufferedAtOffset, Target::kDirect};

// So many of the first bytes past the page cache; 0: all through it.
inline WriteOptions with_direct(WriteOptions options, std::uint64_t nbytes) {
  options.n_direct_threads = 2 * options.n_threads;
  if (nbytes > 0) options.direct_nbytes = nbytes;
  return options;
}

// Records that are written to any target.
class Scenario {
 public:
  explicit Scenario(std::vector<Record> records, std::uint64_t alignment = 64,
                    const std::string& parent = "/tmp")
      : records_(std::move(records)), alignment_(alignment), folder_(parent) {
    std::vector<RecordSpec> specs = specs_of(records_);
    specs.push_back({".data/serialization_id", kIdNbytes});
    layout_ = plan("archive", specs, alignment);
    payloads_ = [this](std::size_t i) -> const std::byte* {
      EXPECT_LT(i, records_.size()) << "the serialization id is computed";
      if (records_[i].hole) return nullptr;
      EXPECT_FALSE(records_[i].data.empty()) << "asked for an empty payload";
      return data_of(records_[i].data);
    };
  }
  Scenario(const Scenario&) = delete;
  Scenario& operator=(const Scenario&) = delete;

  const ArchiveLayout& layout() const { return layout_; }
  const Payloads& payloads() const { return payloads_; }

  std::string write(Target target, const WriteOptions& options) const {
    return write(target, options, payloads_);
  }
  std::string write(Target target, const WriteOptions& options, const Payloads& payloads) const {
    Progress progress{0};
    std::string bytes;
    if (target == Target::kMemory) {
      bytes.assign(layout_.nbytes(), '\xAA');
      write_to_memory(layout_, payloads, data_of(bytes), options, progress, kNoPoll);
    } else if (target == Target::kStream) {
      const StreamSink sink = [&](const std::byte* data, std::uint64_t nbytes) {
        EXPECT_GT(nbytes, 0u);
        bytes += data == nullptr ? std::string(nbytes, '\0') : text_of(data, nbytes);
      };
      write_to_stream(layout_, payloads, sink, options, progress);
    } else {
      bytes = write_to_file(target, options, payloads, progress);
    }
    EXPECT_EQ(progress, layout_.nbytes());
    return bytes;
  }

  // Every target yields the reference's bytes, with and without threads, with and without CRCs.
  void check(std::size_t chunk_nbytes = kChunk) const {
    for (const bool compute_crcs : {true, false}) {
      const std::string expected = reference(records_, alignment_, compute_crcs);
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
  std::string write_to_file(Target target, const WriteOptions& options, const Payloads& payloads,
                            Progress& progress) const {
    constexpr std::uint64_t kOffset = 12345;
    const std::uint64_t offset = target == Target::kBufferedAtOffset ? kOffset : 0;
    AtomicFile file(folder_ / "file", "file");
    if (target == Target::kDirect) {
      write_direct(layout_, payloads, file.file(), options, progress, kNoPoll);
    } else {
      write_buffered(layout_, payloads, file.file(), offset, options, progress, kNoPoll);
    }
    file.commit(false);
    const std::string bytes = read_file(folder_ / "file");
    EXPECT_EQ(bytes.substr(0, offset), std::string(offset, '\0'));
    return bytes.substr(offset);
  }

  std::vector<Record> records_;
  std::uint64_t alignment_;
  ArchiveLayout layout_;
  Payloads payloads_;
  Folder folder_;
};

}  // namespace ptsave::common
