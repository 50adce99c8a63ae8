// The reading half of archive.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "common/archives.h"
#include "core/base/error.h"
#include "core/format/archive.h"
#include "core/format/zip.h"

namespace ptsave {
namespace {

using namespace common;
using std::string;

CentralDirectory find(string file) {
  const auto bytes = std::span<const std::byte>(bytes_of(file));
  return find_central_directory(bytes.last(std::min<std::size_t>(bytes.size(), kMaxTailNbytes)),
                                bytes.size());
}

ArchiveIndex parse(string file) {
  const CentralDirectory where = find(file);
  return parse_central_directory(bytes_of(file).subspan(where.offset, where.nbytes), where);
}

// parse(), then every local header.
std::vector<std::uint64_t> payload_offsets(string file) {
  const ArchiveIndex index = parse(file);
  std::vector<std::uint64_t> offsets;
  for (const IndexedRecord& record : index.records()) {
    offsets.push_back(payload_offset(bytes_of(file).subspan(record.header_offset), record,
                                     index.root().size(), record.limit));
  }
  return offsets;
}

const std::vector<Record>& sample() {
  static const std::vector<Record> kRecords = {
      {"data.pkl", "hello"}, {"data/0", string(100, 'z')}, {"empty", ""}, {"version", "3\n"}};
  return kRecords;
}

TEST(Parse, ReadsBackWhatPlanWrote) {
  for (const std::uint64_t alignment : {1u, 64u, 4096u}) {
    const string file = archive(sample(), alignment, "my model");
    const ArchiveIndex index = parse(file);
    EXPECT_EQ(index.root(), "my model");
    EXPECT_TRUE(index.has_crcs());
    ASSERT_EQ(index.records().size(), sample().size());
    const auto offsets = payload_offsets(file);
    for (std::size_t i = 0; i < sample().size(); ++i) {
      const IndexedRecord& record = index.records()[i];
      EXPECT_EQ(record.name, sample()[i].name);
      EXPECT_EQ(file.substr(record.payload_offset, record.nbytes), sample()[i].data);
      EXPECT_EQ(record.payload_offset, offsets[i]);
      EXPECT_EQ(record.crc, crc_of(sample()[i].data));
      EXPECT_TRUE(record.stored());
      EXPECT_FALSE(record.encrypted());
      EXPECT_FALSE(record.directory);
      EXPECT_EQ(index.find(record.name), i);
    }
    EXPECT_EQ(index.find("nope"), ArchiveIndex::kNotFound);
    EXPECT_EQ(index.find(""), ArchiveIndex::kNotFound);
  }
}

TEST(Parse, CopiesAndMovesKeepFinding) {
  ArchiveIndex index = parse(archive(sample()));
  const ArchiveIndex copy = index;
  const ArchiveIndex moved = std::move(index);
  EXPECT_EQ(copy.find("empty"), 2u);
  EXPECT_EQ(moved.find("empty"), 2u);
}

TEST(Parse, TellsFilesWithoutCrcs) {
  EXPECT_TRUE(parse(archive(sample(), 64, "r", true)).has_crcs());
  EXPECT_FALSE(parse(archive(sample(), 64, "r", false)).has_crcs());
  EXPECT_TRUE(parse(archive({{"empty", ""}}, 64, "r", false)).has_crcs());
}

TEST(Parse, AcceptsTrailingBytesLikeTorch) {
  EXPECT_EQ(parse(archive(sample()) + string(100, 'q')).records().size(), sample().size());
}

// zip -0 -r: a folder entry for the root and one below, no descriptors, no padding.
TEST(Parse, AcceptsInfoZip) {
  const string file = unhex(
      "504b03040a00000000007d21755d00000000000000000000000002000000722f504b03040a00000000007d2175"
      "5d000000000000000000000000030000"
      "00722f65504b03040a00000000007d21755d00000000000000000000000004000000722f642f504b03040a0000"
      "0000007d21755dc2412435030000"
      "000300000005000000722f642f30616263504b01021e030a00000000007d21755d000000000000000000000000"
      "020000000000000000001000ed4100"
      "000000722f504b01021e030a00000000007d21755d000000000000000000000000030000000000000000000000"
      "a48120000000722f65504b01021e03"
      "0a00000000007d21755d000000000000000000000000040000000000000000001000ed4141000000722f642f50"
      "4b01021e030a00000000007d21755d"
      "c24124350300000003000000050000000000000000000000a48163000000722f642f30504b0506000000000400"
      "0400c6000000890000000000");
  const ArchiveIndex index = parse(file);
  EXPECT_EQ(index.root(), "r");
  ASSERT_EQ(index.records().size(), 2u);
  EXPECT_EQ(index.records()[0].name, "e");
  EXPECT_EQ(index.records()[1].name, "d/0");
  EXPECT_EQ(file.substr(index.records()[1].payload_offset, 3), "abc");
  EXPECT_EQ(payload_offsets(file), (std::vector<std::uint64_t>{65, 134}));
}

// Python's zipfile to a pipe: a 24-byte descriptor behind a small record, one behind an empty
// record.
TEST(Parse, AcceptsZipfileAndCorrectsTheWrongPrediction) {
  const string file = unhex(
      "504b03042d00080000000000210000000000ffffffffffffffff03001400722f30010010000000000000000000"
      "0000000000000000616263504b0708"
      "c241243503000000000000000300000000000000504b0304140008000000000021000000000000000000000000"
      "0003000000722f65504b0708000000"
      "000000000000000000504b01022d032d000800000000002100c241243503000000030000000300000000000000"
      "00000000800100000000722f30504b"
      "0102140314000800000000002100000000000000000000000000030000000000000000000000800150000000"
      "722f65504b0506000000000200020062"
      "000000810000000000");
  const ArchiveIndex index = parse(file);
  EXPECT_EQ(index.records()[0].payload_offset, 61u);
  EXPECT_EQ(payload_offsets(file), (std::vector<std::uint64_t>{53, 113}));
  EXPECT_EQ(file.substr(53, 3), "abc");
}

// What a FormatError says about `file`, "" if it is accepted.
string fault(const string& file) {
  try {
    payload_offsets(file);
  } catch (const FormatError& error) {
    EXPECT_FALSE(error.detail().empty());
    return error.reason();
  }
  return "";
}

constexpr const char* kZipArchive = "PytorchStreamReader failed reading zip archive: ";
const string kCorrupt = string(kZipArchive) + "invalid header or archive is corrupted";
const string kMultidisk = string(kZipArchive) + "unsupported multidisk archive";
const string kNotZip = string(kZipArchive) + "not a ZIP archive";
const string kNoDirectory = string(kZipArchive) + "failed finding central directory";
const string kInvalidName = string(kZipArchive) + "invalid filename";
const string kTooManyFiles = string(kZipArchive) + "too many files";
const string kDirectorySize = string(kZipArchive) + "unsupported central directory size";
const string kEncryption = string(kZipArchive) + "unsupported encryption";

TEST(Fault, NotAnArchive) {
  EXPECT_EQ(fault(""), kNotZip);
  EXPECT_EQ(fault("0123456789"), kNotZip);
  EXPECT_EQ(fault(string(22, 'x')), kNoDirectory);
  EXPECT_EQ(fault(string(100'000, 'x')), kNoDirectory);
  EXPECT_EQ(fault(archive(sample()) + string(70'000, 'q')), kNoDirectory);
  EXPECT_EQ(fault("prefix" + archive(sample())), kCorrupt);
  EXPECT_EQ(fault(string("PK\5\6") + string(18, '\0')), "archive does not contain any files");
}

TEST(Fault, EveryTruncation) {
  const string file = archive(sample());
  for (std::size_t n = 0; n < file.size(); ++n) EXPECT_NE(fault(file.substr(0, n)), "") << n;
}

// Offsets of a sample archive's parts, to damage them.
struct Parts {
  string file = archive(sample());
  std::size_t end = file.size() - zip::kEndNbytes;
  std::size_t locator = end - zip::kZip64LocatorNbytes;
  std::size_t wide = locator - zip::kZip64EndNbytes;
  std::size_t directory = find(file).offset;
  std::size_t second = directory + zip::kCentralHeaderNbytes + string("archive/data.pkl").size();
  std::size_t second_local = parse(file).records()[1].header_offset;

  using Store = std::byte* (*)(std::byte*, std::uint64_t);
  string with(std::size_t at, Store store, std::uint64_t value) const {
    string damaged = file;
    store(data_of(damaged) + at, value);
    return damaged;
  }
  string with_counts(std::uint64_t n) const {
    string damaged = with(wide + 24, zip::store64, n);
    zip::store64(data_of(damaged) + wide + 32, n);
    zip::store16(data_of(damaged) + end + 8, std::min<std::uint64_t>(n, 0xFFFF));
    zip::store16(data_of(damaged) + end + 10, std::min<std::uint64_t>(n, 0xFFFF));
    return damaged;
  }
  string with_text(std::size_t at, std::string_view text) const {
    return string(file).replace(at, text.size(), text);
  }
};

TEST(Fault, EndRecords) {
  const Parts p;
  EXPECT_EQ(fault(p.file), "");
  EXPECT_EQ(fault(p.with(p.locator + 8, zip::store64, 1ull << 60)), kNotZip);
  EXPECT_EQ(fault(p.with(p.locator + 8, zip::store64, ~0ull)), kNotZip);
  EXPECT_EQ(fault(p.with(p.locator + 8, zip::store64, p.wide + 1)), kNotZip);
  EXPECT_EQ(fault(p.with(p.locator + 8, zip::store64, p.wide - 4)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.locator + 16, zip::store32, 2)), kMultidisk);
  EXPECT_EQ(fault(p.with(p.wide, zip::store32, 0)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.wide + 4, zip::store64, 10)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.wide + 4, zip::store64, ~0ull)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.wide + 16, zip::store32, 3)), kMultidisk);
  EXPECT_EQ(fault(p.with(p.end + 10, zip::store16, 9)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.end + 16, zip::store32, 9)), kCorrupt);
  // Without the locator the narrow record rules, as in torch.
  EXPECT_EQ(fault(p.with(p.locator, zip::store32, 0)), "");
}

TEST(Fault, LyingCounts) {
  const Parts p;
  EXPECT_EQ(fault(p.with_counts(3)), kCorrupt);
  EXPECT_EQ(fault(p.with_counts(5)), kCorrupt);
  EXPECT_EQ(fault(p.with_counts(1 << 20)), kCorrupt);
  EXPECT_EQ(fault(p.with_counts(kM)), kCorrupt);
  EXPECT_EQ(fault(p.with_counts(kM + 1)), kTooManyFiles);
  EXPECT_EQ(fault(p.with_counts(~0ull)), kTooManyFiles);
  EXPECT_EQ(fault(p.with_counts(0)), "archive does not contain any files");
}

// Files with several faults at once; torch reports the one that miniz looks at first.
TEST(Fault, EndRecordsInTheOrderOfMiniz) {
  Parts p;
  const std::size_t record_nbytes = p.wide + 4, disk = p.wide + 16, n_here = p.wide + 24,
                    n = p.wide + 32, nbytes = p.wide + 40, n_disks = p.locator + 16;
  EXPECT_EQ(fault(p.with(n_here, zip::store64, 3)), kMultidisk);
  EXPECT_EQ(fault(p.with(n, zip::store64, 3)), kMultidisk);
  EXPECT_EQ(fault(p.with(n, zip::store64, kM + 1)), kTooManyFiles);
  EXPECT_EQ(fault(p.with(n_here, zip::store64, kM + 1)), kTooManyFiles);
  // From the last fault to the first: each takes over from the one before.
  p.file = p.with(p.end + 16, zip::store32, 9);
  EXPECT_EQ(fault(p.file), kCorrupt);
  p.file = p.with(disk, zip::store32, 3);
  EXPECT_EQ(fault(p.file), kMultidisk);
  p.file = p.with(nbytes, zip::store64, kM + 1);
  EXPECT_EQ(fault(p.file), kDirectorySize);
  p.file = p.with(n, zip::store64, kM + 1);
  EXPECT_EQ(fault(p.file), kTooManyFiles);
  p.file = p.with(n_disks, zip::store32, 2);
  EXPECT_EQ(fault(p.file), kMultidisk);
  p.file = p.with(record_nbytes, zip::store64, 43);
  EXPECT_EQ(fault(p.file), kCorrupt);
  p.file = p.with(p.locator + 8, zip::store64, ~0ull);
  EXPECT_EQ(fault(p.file), kNotZip);
}

TEST(Fault, LyingDirectory) {
  Parts p;
  // The narrow record defers to the wide one everywhere.
  p.file = p.with(p.end + 12, zip::store32, kM);
  p.file = p.with(p.end + 16, zip::store32, kM);
  EXPECT_EQ(fault(p.file), "");
  EXPECT_EQ(fault(p.with(p.wide + 40, zip::store64, 1ull << 33)), kDirectorySize);
  EXPECT_EQ(fault(p.with(p.wide + 40, zip::store64, kM + 1)), kDirectorySize);
  EXPECT_EQ(fault(p.with(p.wide + 40, zip::store64, kM)), kCorrupt);
  for (const std::uint64_t nbytes : {std::uint64_t{0}, std::uint64_t{1 << 20},
                                     p.wide - p.directory - 1, p.wide - p.directory + 1}) {
    EXPECT_EQ(fault(p.with(p.wide + 40, zip::store64, nbytes)), kCorrupt) << nbytes;
  }
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{p.directory - 1},
                                     std::uint64_t{p.directory + 1}, ~std::uint64_t{0}}) {
    EXPECT_EQ(fault(p.with(p.wide + 48, zip::store64, offset)), kCorrupt) << offset;
  }
}

TEST(Fault, CentralHeader) {
  const Parts p;
  EXPECT_EQ(fault(p.with(p.second, zip::store32, 0)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.second + 28, zip::store16, 60000)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.second + 30, zip::store16, 60000)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.second + 32, zip::store16, 60000)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.second + 34, zip::store16, 5)), kMultidisk);
  EXPECT_EQ(fault(p.with(p.second + 8, zip::store16, 0x2808)), kEncryption);
  EXPECT_EQ(fault(p.with(p.second + 20, zip::store32, 101)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.second + 24, zip::store32, 101)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.second + 24, zip::store32, kM)), kCorrupt);
}

TEST(Fault, CentralHeaderInTheOrderOfMiniz) {
  Parts p;
  p.file = p.with_text(p.second + zip::kCentralHeaderNbytes + 8, "/");
  EXPECT_EQ(fault(p.file), kInvalidName);
  p.file = p.with(p.second + 8, zip::store16, 0x2808);
  EXPECT_EQ(fault(p.file), kEncryption);
  p.file = p.with(p.second + 34, zip::store16, 5);
  EXPECT_EQ(fault(p.file), kMultidisk);
  p.file = p.with(p.second + 20, zip::store32, 101);
  EXPECT_EQ(fault(p.file), kCorrupt);
}

TEST(Fault, PlaceOfARecord) {
  const Parts p;
  for (const std::uint64_t offset :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{p.directory - 1},
        std::uint64_t{p.directory}, std::uint64_t{0x7FFFFFFF}, kM}) {
    EXPECT_EQ(fault(p.with(p.second + 42, zip::store32, offset)), kCorrupt) << offset;
  }
  string huge = p.with(p.second + 20, zip::store32, kM - 1);
  zip::store32(data_of(huge) + p.second + 24, kM - 1);
  EXPECT_EQ(fault(huge), kCorrupt);
}

TEST(Fault, Names) {
  const Parts p;
  const std::size_t first_name = p.directory + zip::kCentralHeaderNbytes;
  const std::size_t name = p.second + zip::kCentralHeaderNbytes;  // archive/data/0
  EXPECT_EQ(fault(p.with_text(first_name + 7, "_")),
            "file in archive is not in a subdirectory: archive_data.pkl");
  EXPECT_EQ(fault(p.with_text(first_name, "/")), kInvalidName);
  EXPECT_EQ(fault(p.with_text(first_name, string(1, '\0'))), kInvalidName);
  EXPECT_EQ(fault(p.with_text(name, "another")),
            "file in archive is not in a subdirectory archive/: another/data/0");
  EXPECT_EQ(fault(p.with_text(name + 7, "_")),
            "file in archive is not in a subdirectory archive/: archive_data/0");
  EXPECT_EQ(fault(p.with_text(name + 9, string(1, '\0'))), kInvalidName);
  EXPECT_EQ(fault(p.with_text(name + 8, "/")), kInvalidName);
  EXPECT_EQ(fault(p.with_text(name + 8, "../a/0")), kInvalidName);
}

TEST(Fault, FolderWithData) {
  const Parts p;
  EXPECT_EQ(fault(p.with_text(p.second + zip::kCentralHeaderNbytes + 13, "/")), kCorrupt);
}

TEST(Fault, DuplicateNames) {
  string file = archive({{"a", "1"}, {"b", "2"}, {"c", "3"}});
  const std::size_t at = file.rfind("archive/c");
  file.replace(at, 9, "archive/a");
  try {
    parse(file);
    FAIL();
  } catch (const FormatError& error) {
    EXPECT_EQ(error.reason(), kCorrupt);
    EXPECT_EQ(error.record(), "a");
    EXPECT_NE(error.detail().find("'a'"), string::npos);
  }
}

TEST(Fault, LocalHeader) {
  const Parts p;
  const string reason =
      "PytorchStreamReader failed reading file data/0: invalid header or archive is corrupted";
  EXPECT_EQ(fault(p.with(p.second_local, zip::store32, 0)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 6, zip::store16, 0x0809)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 6, zip::store16, 0x0800)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 6, zip::store16, 0x0828)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 6, zip::store16, 0x0848)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 6, zip::store16, 0x2808)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 8, zip::store16, 8)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 26, zip::store16, 15)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 28, zip::store16, 60000)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 28, zip::store16, 5)), reason);
  EXPECT_EQ(fault(p.with_text(p.second_local + 30 + 8, "datb/0")), reason);
  EXPECT_EQ(fault(p.with(p.second + 10, zip::store16, 8)), reason);
}

// What torch refuses only when the record is asked for; other flags mean nothing to it.
TEST(Fault, UnsupportedRecords) {
  const Parts p;
  const auto with = [&p](std::uint16_t flags, std::uint16_t method, bool in_both) {
    string damaged = p.file;
    for (const std::size_t at : {p.second + 8, p.second_local + 6}) {
      if (at == p.second_local + 6 && !in_both) break;
      zip::store16(data_of(damaged) + at, 0x0808u | flags);
      zip::store16(data_of(damaged) + at + 2, method);
    }
    return damaged;
  };
  const string reason = "PytorchStreamReader failed retrieving file meta-data for data/0: ";
  for (const bool in_both : {false, true}) {
    EXPECT_EQ(fault(with(0x0001, 0, in_both)), reason + "unsupported encryption");
    EXPECT_EQ(fault(with(0x0040, 0, in_both)), reason + "unsupported encryption");
    EXPECT_EQ(fault(with(0x0020, 0, in_both)), reason + "unsupported feature");
    EXPECT_EQ(fault(with(0x0061, 0, in_both)), reason + "unsupported encryption");
    EXPECT_EQ(fault(with(0x0020, 8, in_both)), reason + "unsupported feature");
    EXPECT_EQ(fault(with(0x0000, 12, in_both)), reason + "unsupported method");
    EXPECT_EQ(fault(with(0x0061, 12, in_both)), reason + "unsupported method");
    EXPECT_EQ(fault(with(0xD796, 0, in_both)), "");
    EXPECT_EQ(parse(with(0x0061, 12, in_both)).records().size(), sample().size());
  }
  EXPECT_EQ(fault(with(0, 8, true)), "");  // the caller's to inflate
}

TEST(Fault, NamesTheRecordAndItsOffset) {
  const Parts p;
  try {
    payload_offsets(p.with(p.second_local, zip::store32, 0));
    FAIL();
  } catch (const FormatError& error) {
    EXPECT_EQ(error.record(), "data/0");
    EXPECT_EQ(error.offset(), p.second_local);
  }
}

TEST(PayloadOffset, NeedsOnlyTheFixedPart) {
  string file = archive(sample());
  const ArchiveIndex index = parse(file);
  const IndexedRecord& record = index.records()[1];
  const auto header = bytes_of(file).subspan(record.header_offset);
  for (const std::size_t n : {std::size_t{30}, std::size_t{33}, std::size_t{40}, header.size()}) {
    EXPECT_EQ(payload_offset(header.first(n), record, index.root().size(), record.limit),
              record.payload_offset);
  }
  EXPECT_THROW(payload_offset(header.first(29), record, index.root().size(), record.limit),
               FormatError);
  EXPECT_THROW(payload_offset(header, record, index.root().size(), record.payload_offset + 99),
               FormatError);
  EXPECT_THROW(payload_offset(header, record, index.root().size(), 0), FormatError);
}

// Each flipped bit is refused, shows in a checked CRC, or carries no meaning.
TEST(Fault, EveryFlippedBitOutsidePayloads) {
  const string file = archive(sample(), 1);
  const ArchiveIndex before = parse(file);
  const auto offsets = payload_offsets(file);
  for (std::size_t bit = 0; bit < file.size() * 8; ++bit) {
    string flipped = file;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    if (!fault(flipped).empty()) continue;
    const ArchiveIndex after = parse(flipped);
    EXPECT_EQ(payload_offsets(flipped), offsets) << bit / 8;
    ASSERT_EQ(after.records().size(), before.records().size());
    for (std::size_t i = 0; i < after.records().size(); ++i) {
      EXPECT_EQ(after.records()[i].name, before.records()[i].name) << bit / 8;
      EXPECT_EQ(after.records()[i].nbytes, before.records()[i].nbytes) << bit / 8;
      EXPECT_EQ(after.records()[i].method, 0) << bit / 8;
    }
  }
}

TEST(Find, WantsATailOfTheFile) {
  string file = archive(sample());
  EXPECT_THROW(find_central_directory(bytes_of(file), file.size() - 1), std::invalid_argument);
}

TEST(Find, AcceptsATailThatHoldsJustTheEndRecords) {
  string file = archive(sample());
  const CentralDirectory where =
      find_central_directory(bytes_of(file).last(zip::kEndRecordsNbytes), file.size());
  EXPECT_EQ(where.offset, find(file).offset);
  EXPECT_EQ(where.n_records, sample().size());
  EXPECT_THROW(find_central_directory(bytes_of(file).last(zip::kEndRecordsNbytes - 1), file.size()),
               FormatError);
}

}  // namespace
}  // namespace ptsave
