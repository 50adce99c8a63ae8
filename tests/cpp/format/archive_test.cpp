// The writing half of archive.h.
#include "core/format/archive.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "common/archives.h"

namespace ptsave {
namespace {

using namespace common;
using std::string;

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
  const string id = serialization_id(hash_of(names), crcs);
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
  specs.reserve(50);
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
  layout.local_header(0, data_of(header));
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
  layout.local_header(1, data_of(header));
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
    string tail = central_directory(layout, crcs);
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

TEST(Plan, ARecordsOwnAlignmentCountsIfItIsAMultiple) {
  const std::vector<RecordSpec> records = {{"a", 100}, {"b", 5000, 4096}, {"c", 100}};
  const ArchiveLayout ours = plan("r", records, 64);
  EXPECT_EQ(ours.record(1).payload_offset, 4096u);
  EXPECT_EQ(ours.record(0).payload_offset % 64, 0u);
  EXPECT_LT(ours.record(2).payload_offset, 4096u + 5000 + 200);
  EXPECT_NE(plan("r", records, 100).record(1).payload_offset % 4096, 0u);
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
  specs.reserve(kRecords);
  for (std::size_t i = 0; i < kRecords; ++i) specs.push_back({"data/" + std::to_string(i), i % 9});
  const ArchiveLayout layout = plan("model", specs, 64);
  string tail = central_directory(layout, std::vector<std::uint32_t>(kRecords, 7));
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
  EXPECT_THROW(central_directory(layout, {}), std::invalid_argument);
}

// Ids read from files of torch 2.13; version and byteorder are written behind the caller's records.
string torch_id(std::vector<string> names, std::vector<std::uint32_t> crcs, bool with_crcs = true) {
  names.insert(names.end(), {"version", "byteorder"});
  crcs.insert(crcs.end(), {with_crcs ? crc_of("3\n") : 0, with_crcs ? crc_of("little") : 0});
  return serialization_id(hash_of(names), crcs);
}

TEST(SerializationId, IsTorchs) {
  EXPECT_EQ(torch_id({"data.pkl", "data/0"}, {crc_of("hello")}),
            "1506405496436551062400000015379722798257");
  EXPECT_EQ(torch_id({"data.pkl"}, {0}, false), "1176810298272338838400000011093822414574");
}

TEST(SerializationId, FollowsTheHashSetThroughItsGrowth) {
  std::vector<string> names;
  names.reserve(100);
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

}  // namespace
}  // namespace ptsave
