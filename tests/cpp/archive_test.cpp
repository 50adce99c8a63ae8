#include "core/archive.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "core/error.h"
#include "core/zip.h"

namespace ptsave {
namespace {

using std::string;

constexpr std::uint64_t kM = 0xFFFFFFFF;  // where zip64 begins

std::span<std::byte> bytes_of(string& text) { return std::as_writable_bytes(std::span(text)); }

string unhex(std::string_view digits) {
  string out;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    out += static_cast<char>(std::stoi(string(digits.substr(i, 2)), nullptr, 16));
  }
  return out;
}

std::uint32_t crc_of(const string& data) {
  return static_cast<std::uint32_t>(
      crc32(0, reinterpret_cast<const Bytef*>(data.data()), static_cast<uInt>(data.size())));
}

struct Record {
  string name;
  string data;
};

// A whole archive in memory, as torch would write it.
string archive(const std::vector<Record>& records, std::uint64_t alignment = 64,
               const string& root = "archive", bool with_crcs = true) {
  std::vector<RecordSpec> specs;
  std::vector<std::uint32_t> crcs;
  for (const Record& record : records) {
    specs.push_back({record.name, record.data.size()});
    crcs.push_back(with_crcs ? crc_of(record.data) : 0);
  }
  const ArchiveLayout layout = plan(root, specs, alignment);
  string file(layout.central_directory_offset(), '\0');
  for (std::size_t i = 0; i < records.size(); ++i) {
    const RecordLayout& at = layout.record(i);
    layout.local_header(i, bytes_of(file).data() + at.header_offset);
    file.replace(at.payload_offset, at.nbytes, records[i].data);
    layout.data_descriptor(i, crcs[i], bytes_of(file).data() + at.payload_end());
  }
  file += layout.central_directory(crcs);
  EXPECT_EQ(file.size(), layout.nbytes());
  return file;
}

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
  static const std::vector<Record> records = {
      {"data.pkl", "hello"}, {"data/0", string(100, 'z')}, {"empty", ""}, {"version", "3\n"}};
  return records;
}

// ---------------------------------------------------------------------------------------- writing

// PyTorchFileWriter of torch 2.13: records a = "hi", e = "", alignment 1.
constexpr std::string_view kTorchFile =
    "504b03040000080800000000000000000000000000000000000009000400617263686976652f61464200006869"
    "504b0708ac2a93d80200000002000000504b030400000008000000000000000000000000000000000000090004"
    "00617263686976652f6546420000504b0304000008080000000000000000000000000000000000000f00040061"
    "7263686976652f76657273696f6e46420000330a504b0708d19e67550200000002000000504b03040000080800"
    "000000000000000000000000000000000011000400617263686976652f627974656f72646572464200006c6974"
    "746c65504b0708853de3190600000006000000504b030400000808000000000000000000000000000000000000"
    "1e000400617263686976652f2e646174612f73657269616c697a6174696f6e5f69644642000030353731353736"
    "323635313338373633383832363030303030303236333031363533343532353035504b0708c20a19d128000000"
    "28000000504b0102000000000808000000000000ac2a93d8020000000200000009000000000000000000000000"
    "0000000000617263686976652f61504b0102000000000008000000000000000000000000000000000000090000"
    "00000000000000000000003d000000617263686976652f65504b0102000000000808000000000000d19e675502"
    "000000020000000f0000000000000000000000000068000000617263686976652f76657273696f6e504b010200"
    "0000000808000000000000853de31906000000060000001100000000000000000000000000ab00000061726368"
    "6976652f627974656f72646572504b0102000000000808000000000000c20a19d128000000280000001e000000"
    "00000000000000000000f4000000617263686976652f2e646174612f73657269616c697a6174696f6e5f696450"
    "4b06062c000000000000001e032d00000000000000000005000000000000000500000000000000360100000000"
    "00006c01000000000000504b060700000000a20200000000000001000000504b05060000000005000500360100"
    "006c0100000000";

TEST(Plan, GivesTheBytesTorchWrites) {
  const std::vector<string> names = {"a", "e", "version", "byteorder"};
  const std::vector<std::uint32_t> crcs = {crc_of("hi"), crc_of("3\n"), crc_of("little")};
  const string id = serialization_id(names, crcs);
  const string file = archive({{"a", "hi"},
                               {"e", ""},
                               {"version", "3\n"},
                               {"byteorder", "little"},
                               {".data/serialization_id", id}},
                              1);
  EXPECT_EQ(file, unhex(kTorchFile));
}

TEST(Plan, AlignsEveryPayloadAndLeavesNoGap) {
  std::vector<RecordSpec> specs;
  for (std::uint64_t i = 0; i < 50; ++i) specs.push_back({"data/" + std::to_string(i), i * 37});
  for (const std::uint64_t alignment : {1u, 2u, 3u, 64u, 100u, 512u, 4096u, 65000u}) {
    const ArchiveLayout layout = plan("model", specs, alignment);
    std::uint64_t cursor = 0;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const RecordLayout& at = layout.record(i);
      EXPECT_EQ(at.header_offset, cursor);
      EXPECT_EQ(at.payload_offset % alignment, 0u);
      EXPECT_EQ(at.descriptor_nbytes, i == 0 ? 0u : 16u);
      EXPECT_EQ(layout.name(i), specs[i].name);
      cursor = at.end();
    }
    EXPECT_EQ(layout.central_directory_offset(), cursor);
  }
}

TEST(Plan, PadsWithZInAnFbField) {
  const std::vector<RecordSpec> specs = {{"data.pkl", 5}};
  const ArchiveLayout layout = plan("small", specs, 64);
  ASSERT_EQ(layout.record(0).payload_offset, 64u);
  string header(64, '?');
  layout.local_header(0, bytes_of(header).data());
  EXPECT_EQ(header.substr(28, 2), string("\x14\0", 2));
  EXPECT_EQ(header.substr(30), "small/data.pkl" + string("FB\x10\0", 4) + string(16, 'Z'));
}

struct Edge {
  std::uint64_t first_nbytes;
  std::uint64_t first_payload;
  std::uint32_t first_descriptor;
  std::uint64_t second_header;
  std::uint64_t second_payload;
  std::uint32_t second_descriptor;
};

// Offsets read from files of torch 2.13: records 0 (a hole) and 1 (3 bytes), root r, alignment 1.
TEST(Plan, FollowsTorchAcrossFourGiB) {
  for (const Edge& edge : {Edge{kM - 1, 37, 16, 4294967347, 4294967396, 24},
                           Edge{kM, 57, 24, 4294967376, 4294967425, 24},
                           Edge{kM + 1, 57, 24, 4294967377, 4294967426, 24},
                           Edge{4294967241, 37, 16, kM - 1, 4294967331, 16},
                           Edge{4294967242, 37, 16, kM, 4294967344, 24},
                           Edge{4294967243, 37, 16, kM + 1, 4294967345, 24}}) {
    const std::vector<RecordSpec> specs = {{"0", edge.first_nbytes}, {"1", 3}};
    const ArchiveLayout layout = plan("r", specs, 1);
    EXPECT_EQ(layout.record(0).payload_offset, edge.first_payload);
    EXPECT_EQ(layout.record(0).descriptor_nbytes, edge.first_descriptor);
    EXPECT_EQ(layout.record(1).header_offset, edge.second_header);
    EXPECT_EQ(layout.record(1).payload_offset, edge.second_payload);
    EXPECT_EQ(layout.record(1).descriptor_nbytes, edge.second_descriptor);
  }
}

// The same, alignment 64: both zip64 fields, padding behind them, an empty record beyond 8 GiB.
TEST(Plan, PadsBehindZip64) {
  const std::vector<RecordSpec> specs = {{"0", kM}, {"1", kM}, {"2", 0}};
  const ArchiveLayout layout = plan("r", specs, 64);
  EXPECT_EQ(layout.record(0).payload_offset, 64u);
  EXPECT_EQ(layout.record(1).header_offset, 4294967383u);
  EXPECT_EQ(layout.record(1).payload_offset, 4294967488u);
  EXPECT_EQ(layout.record(2).header_offset, 8589934807u);
  EXPECT_EQ(layout.record(2).payload_offset, 8589934912u);
  EXPECT_EQ(layout.record(2).descriptor_nbytes, 0u);
  string header(4294967488u - 4294967383u, '?');
  layout.local_header(1, bytes_of(header).data());
  EXPECT_EQ(header,
            unhex("504b03040000080800000000000000000000000000000000000003004800722f3101001800"
                  "ffffffff0000000000000000000000005700000001000000464228005a5a5a5a5a5a5a5a"
                  "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a"));
}

TEST(Plan, WhatItPlansIsParsedBackAcrossFourGiB) {
  for (const std::uint64_t nbytes : {kM - 1, kM, kM + 1, kM - 54, kM - 53, kM - 52}) {
    const std::vector<RecordSpec> specs = {{"0", nbytes}, {"1", 3}, {"2", 0}, {"3", kM}, {"4", 1}};
    const ArchiveLayout layout = plan("r", specs, 1);
    const std::vector<std::uint32_t> crcs = {1, 2, 0, 4, 5};
    string tail = layout.central_directory(crcs);
    const CentralDirectory where = find_central_directory(bytes_of(tail), layout.nbytes());
    EXPECT_EQ(where.offset, layout.central_directory_offset());
    const ArchiveIndex index = parse_central_directory(bytes_of(tail).first(where.nbytes), where);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const IndexedRecord& record = index.records()[i];
      EXPECT_EQ(record.nbytes, specs[i].nbytes);
      EXPECT_EQ(record.header_offset, layout.record(i).header_offset);
      EXPECT_EQ(record.payload_offset, layout.record(i).payload_offset);
      EXPECT_EQ(record.limit, layout.record(i).end());
      EXPECT_EQ(record.crc, crcs[i]);
    }
  }
}

TEST(Plan, RefusesPaddingThatOverflowsTheExtraField) {
  const std::vector<RecordSpec> one = {{"a", 100}};
  EXPECT_EQ(plan("r", one, 65536).record(0).payload_offset, 65536u);
  for (const std::uint64_t alignment : {0ull, 131072ull, 1ull << 40, 1ull << 63, ~0ull}) {
    EXPECT_THROW(plan("r", one, alignment), std::invalid_argument) << alignment;
  }
  // The second record needs alignment - 1 bytes of padding: 65531 just fit, unless zip64 joins
  // them.
  const std::uint64_t alignment = 65532;
  const std::uint64_t first = alignment - (16 + 30 + 3 + 4) + 1;
  EXPECT_EQ(plan("r", std::vector<RecordSpec>{{"a", first}, {"b", 1}}, alignment)
                .record(1)
                .payload_offset,
            3 * alignment);
  EXPECT_THROW(plan("r", std::vector<RecordSpec>{{"a", first - 20}, {"b", kM}}, alignment),
               std::invalid_argument);
  EXPECT_THROW(plan("r", std::vector<RecordSpec>{{"a", first + 1}, {"b", 1}}, alignment + 1),
               std::invalid_argument);
}

TEST(Plan, RefusesNamesNobodyCouldRead) {
  const std::vector<string> bad = {
      "", "/a", "a/", "..", "../a", "a/..", "a/../b", string("a\0b", 3), string(65534, 'x')};
  for (const string& name : bad) {
    EXPECT_THROW(plan("r", std::vector<RecordSpec>{{name, 0}}, 1), std::invalid_argument) << name;
  }
  for (const string& name : {string("a\\b"), string("c:"), string("a..b"), string("a/...")}) {
    EXPECT_NO_THROW(plan("r", std::vector<RecordSpec>{{name, 0}}, 1)) << name;
  }
  EXPECT_NO_THROW(plan("r", std::vector<RecordSpec>{{string(65533, 'x'), 0}}, 1));
  for (const string& root : {string(), string("a/b"), string("a\0b", 3)}) {
    EXPECT_THROW(plan(root, {}, 1), std::invalid_argument);
  }
}

TEST(Plan, RefusesDuplicates) {
  EXPECT_THROW(plan("r", std::vector<RecordSpec>{{"a", 1}, {"b", 1}, {"a", 2}}, 64),
               std::invalid_argument);
}

TEST(Plan, RefusesSizesBeyondAFile) {
  for (const std::uint64_t nbytes : {~0ull, 1ull << 63, (1ull << 63) - 1}) {
    EXPECT_THROW(plan("r", std::vector<RecordSpec>{{"a", nbytes}}, 64), std::length_error);
  }
  const std::uint64_t half = 1ull << 62;
  EXPECT_THROW(plan("r", std::vector<RecordSpec>{{"a", half}, {"b", half}}, 64), std::length_error);
}

TEST(Plan, HandlesManyRecords) {
  constexpr std::size_t kRecords = 200'000;
  std::vector<RecordSpec> specs;
  for (std::size_t i = 0; i < kRecords; ++i) specs.push_back({"data/" + std::to_string(i), i % 9});
  const ArchiveLayout layout = plan("model", specs, 64);
  string tail = layout.central_directory(std::vector<std::uint32_t>(kRecords, 7));
  const CentralDirectory where = find_central_directory(bytes_of(tail), layout.nbytes());
  EXPECT_EQ(where.n_records, kRecords);
  const ArchiveIndex index = parse_central_directory(bytes_of(tail).first(where.nbytes), where);
  for (const std::size_t i : {std::size_t{0}, std::size_t{65535}, kRecords - 1}) {
    EXPECT_EQ(index.find(specs[i].name), i);
    EXPECT_EQ(index.records()[i].payload_offset, layout.record(i).payload_offset);
  }
}

TEST(Plan, CentralDirectoryWantsOneCrcPerRecord) {
  const ArchiveLayout layout = plan("r", std::vector<RecordSpec>{{"a", 1}}, 1);
  EXPECT_THROW(layout.central_directory({}), std::invalid_argument);
}

// Ids read from files of torch 2.13; version and byteorder are written behind the caller's records.
string torch_id(std::vector<string> names, std::vector<std::uint32_t> crcs, bool with_crcs = true) {
  names.insert(names.end(), {"version", "byteorder"});
  crcs.insert(crcs.end(), {with_crcs ? crc_of("3\n") : 0, with_crcs ? crc_of("little") : 0});
  return serialization_id(names, crcs);
}

TEST(SerializationId, IsTorchs) {
  EXPECT_EQ(torch_id({"data.pkl", "data/0"}, {crc_of("hello")}),
            "1506405496436551062400000015379722798257");
  EXPECT_EQ(torch_id({"data.pkl"}, {0}, false), "1176810298272338838400000011093822414574");
}

TEST(SerializationId, FollowsTheHashSetThroughItsGrowth) {
  std::vector<string> names;
  for (int i = 0; i < 100; ++i) names.push_back("data/" + std::to_string(i));
  EXPECT_EQ(torch_id(names, {}), "0419255507929791300700000000262787270506");
}

TEST(SerializationId, TakesPayloadsThatLookLikeADescriptor) {
  string twelve = "PK\7\x08\1\2\3\4";
  const auto extra = descriptor_lookalike(bytes_of(twelve));
  ASSERT_EQ(extra, 0x04030201u);
  EXPECT_EQ(torch_id({"data.pkl"}, {*extra, crc_of(twelve)}),
            "1176810298272338838400000755209180346250");
  string eleven = twelve.substr(0, 7);
  EXPECT_EQ(descriptor_lookalike(bytes_of(eleven)), std::nullopt);
  EXPECT_EQ(torch_id({"data.pkl"}, {crc_of(eleven)}), "1176810298272338838400000011650128433536");
  string other = "PK\7\x09\1\2\3\4";
  EXPECT_EQ(descriptor_lookalike(bytes_of(other)), std::nullopt);
}

// ---------------------------------------------------------------------------------------- reading

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
    store(bytes_of(damaged).data() + at, value);
    return damaged;
  }
  string with_counts(std::uint64_t n) const {
    string damaged = with(wide + 24, zip::store64, n);
    zip::store64(bytes_of(damaged).data() + wide + 32, n);
    zip::store16(bytes_of(damaged).data() + end + 8, std::min<std::uint64_t>(n, 0xFFFF));
    zip::store16(bytes_of(damaged).data() + end + 10, std::min<std::uint64_t>(n, 0xFFFF));
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
  EXPECT_EQ(fault(p.with_counts(~0ull)), kCorrupt);
  EXPECT_EQ(fault(p.with_counts(0)), "archive does not contain any files");
}

TEST(Fault, LyingDirectory) {
  Parts p;
  // The narrow record defers to the wide one everywhere.
  p.file = p.with(p.end + 12, zip::store32, kM);
  p.file = p.with(p.end + 16, zip::store32, kM);
  EXPECT_EQ(fault(p.file), "");
  EXPECT_EQ(fault(p.with(p.wide + 40, zip::store64, 1ull << 33)),
            string(kZipArchive) + "unsupported central directory size");
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
  EXPECT_EQ(fault(p.with(p.second + 8, zip::store16, 0x2808)),
            string(kZipArchive) + "unsupported encryption");
  EXPECT_EQ(fault(p.with(p.second + 20, zip::store32, 101)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.second + 24, zip::store32, 101)), kCorrupt);
  EXPECT_EQ(fault(p.with(p.second + 24, zip::store32, kM)), kCorrupt);
}

TEST(Fault, PlaceOfARecord) {
  const Parts p;
  for (const std::uint64_t offset :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{p.directory - 1},
        std::uint64_t{p.directory}, std::uint64_t{0x7FFFFFFF}, kM}) {
    EXPECT_EQ(fault(p.with(p.second + 42, zip::store32, offset)), kCorrupt) << offset;
  }
  string huge = p.with(p.second + 20, zip::store32, kM - 1);
  zip::store32(bytes_of(huge).data() + p.second + 24, kM - 1);
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
  EXPECT_EQ(fault(p.with(p.second_local + 8, zip::store16, 8)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 26, zip::store16, 15)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 28, zip::store16, 60000)), reason);
  EXPECT_EQ(fault(p.with(p.second_local + 28, zip::store16, 5)), reason);
  EXPECT_EQ(fault(p.with_text(p.second_local + 30 + 8, "datb/0")), reason);
  EXPECT_EQ(fault(p.with(p.second + 10, zip::store16, 8)), reason);
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
    if (fault(flipped) != "") continue;
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
