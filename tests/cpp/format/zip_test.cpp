#include "core/format/zip.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

namespace ptsave::zip {
namespace {

std::string hex(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const std::byte b : bytes) {
    out += kDigits[std::to_integer<std::size_t>(b >> 4)];
    out += kDigits[std::to_integer<std::size_t>(b & std::byte{15})];
  }
  return out;
}

// What `write` puts into `nbytes` bytes; it has to fill them exactly.
template <typename Write>
std::string written(std::size_t nbytes, Write write) {
  std::vector<std::byte> out(nbytes, std::byte{0xEE});
  EXPECT_EQ(write(out.data()), out.data() + nbytes);
  return hex(out);
}

std::string local(const Entry& entry, std::size_t more_extra_nbytes = 4) {
  return written(local_header_nbytes(entry),
                 [&](std::byte* out) { return write_local_header(entry, more_extra_nbytes, out); });
}

std::string descriptor(const Entry& entry, std::uint32_t crc) {
  return written(descriptor_nbytes(entry),
                 [&](std::byte* out) { return write_descriptor(entry, crc, out); });
}

std::vector<std::byte> central_bytes(const Entry& entry, std::uint32_t crc) {
  std::vector<std::byte> out(central_header_nbytes(entry));
  EXPECT_EQ(write_central_header(entry, crc, out.data()), out.data() + out.size());
  return out;
}

std::string central(const Entry& entry, std::uint32_t crc) {
  return hex(central_bytes(entry, crc));
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(LittleEndian, RoundTripsAndReturnsTheByteBehind) {
  std::array<std::byte, 8> b{};
  EXPECT_EQ(store16(b.data(), 0x1234567u), b.data() + 2);
  EXPECT_EQ(load16(b.data()), 0x4567);
  EXPECT_EQ(store32(b.data(), 0x89abcdefu), b.data() + 4);
  EXPECT_EQ(load32(b.data()), 0x89abcdefu);
  EXPECT_EQ(hex(std::span(b).first(4)), "efcdab89");
  EXPECT_EQ(store64(b.data(), 0x0123456789abcdefu), b.data() + 8);
  EXPECT_EQ(load64(b.data()), 0x0123456789abcdefu);
}

// The expected bytes of the next five tests were cut from files that torch 2.13 wrote.

TEST(Entry, BelowFourGiB) {
  const Entry entry{"r/0", 0xFFFFFFFE, 0};
  EXPECT_FALSE(entry.zip64());
  EXPECT_EQ(local(entry), "504b03040000080800000000000000000000000000000000000003000400722f30");
  EXPECT_EQ(descriptor(entry, 0), "504b070800000000fefffffffeffffff");
  EXPECT_EQ(central(entry, 0),
            "504b010200000000080800000000000000000000fefffffffeffffff0300000000000000000000000000"
            "00000000722f30");
}

TEST(Entry, OfFourGiBMinusOneMovesItsSizesToZip64) {
  const Entry entry{"r/0", 0xFFFFFFFF, 0};
  EXPECT_EQ(local(entry),
            "504b03040000080800000000000000000000000000000000000003001800722f30"
            "01001000ffffffff000000000000000000000000");
  EXPECT_EQ(descriptor(entry, 0), "504b070800000000ffffffff00000000ffffffff00000000");
  EXPECT_EQ(central(entry, 0),
            "504b010200000000080800000000000000000000ffffffffffffffff0300140000000000000000000000"
            "00000000722f3001001000ffffffff00000000ffffffff00000000");
}

TEST(Entry, AtFourGiBMinusOneMovesItsOffsetToZip64) {
  const Entry entry{"r/1", 3, 0xFFFFFFFF};
  EXPECT_EQ(local(entry),
            "504b03040000080800000000000000000000000000000000000003001000722f31"
            "01000800ffffffff00000000");
  EXPECT_EQ(descriptor(entry, 0x734581ea), "504b0708ea81457303000000000000000300000000000000");
  EXPECT_EQ(central(entry, 0x734581ea),
            "504b0102000000000808000000000000ea814573030000000300000003000c0000000000000000000000"
            "ffffffff722f3101000800ffffffff00000000");
}

TEST(Entry, BeforeFourGiBMinusOneStaysNarrow) {
  const Entry entry{"r/1", 3, 0xFFFFFFFE};
  EXPECT_EQ(descriptor_nbytes(entry), 16u);
  EXPECT_EQ(central(entry, 0x734581ea),
            "504b0102000000000808000000000000ea81457303000000030000000300000000000000000000000000"
            "feffffff722f31");
}

TEST(Entry, WithEverythingInZip64) {
  const Entry entry{"r/1", 0xFFFFFFFF, 0x100000057};
  EXPECT_EQ(local(entry, 44),
            "504b03040000080800000000000000000000000000000000000003004800722f31"
            "01001800ffffffff00000000000000000000000057000000"
            "01000000");
  EXPECT_EQ(central(entry, 0),
            "504b010200000000080800000000000000000000ffffffffffffffff03001c0000000000000000000000"
            "ffffffff722f3101001800ffffffff00000000ffffffff000000005700000001000000");
}

TEST(Entry, EmptyHasNeitherDescriptorNorItsFlag) {
  const Entry near{"r/2", 0, 0};
  EXPECT_EQ(local(near), "504b03040000000800000000000000000000000000000000000003000400722f32");
  EXPECT_EQ(descriptor(near, 0), "");
  const Entry far{"r/2", 0, 0x2000000d7};
  EXPECT_EQ(local(far, 60),
            "504b03040000000800000000000000000000000000000000000003004800722f3201000800d700000002"
            "000000");
  EXPECT_EQ(descriptor(far, 0), "");
}

TEST(EndRecords, AreTheOnesTorchWrites) {
  const Directory directory{.offset = 0x1000001ad, .nbytes = 0x148, .n_entries = 5};
  EXPECT_EQ(
      written(kEndRecordsNbytes, [&](std::byte* out) { return write_end_records(directory, out); }),
      "504b06062c000000000000001e032d000000000000000000050000000000000005000000000000004801"
      "000000000000ad01000001000000504b060700000000f50200000100000001000000504b050600000000"
      "0500050048010000ffffffff0000");
}

TEST(EndRecords, RoundTrip) {
  const Directory directory{.offset = 100000, .nbytes = 70000 * 50, .n_entries = 70000};
  std::array<std::byte, kEndRecordsNbytes> bytes{};
  write_end_records(directory, bytes.data());
  const std::span<const std::byte> all(bytes);

  const auto wide = parse_zip64_end(all);
  ASSERT_TRUE(wide);
  EXPECT_EQ(wide->directory.offset, directory.offset);
  EXPECT_EQ(wide->directory.nbytes, directory.nbytes);
  EXPECT_EQ(wide->directory.n_entries, directory.n_entries);
  EXPECT_EQ(wide->n_entries_on_disk, directory.n_entries);
  EXPECT_EQ(wide->record_nbytes, kZip64EndNbytes);

  const auto locator = parse_zip64_locator(all.subspan(kZip64EndNbytes));
  ASSERT_TRUE(locator);
  EXPECT_EQ(locator->end_offset, directory.offset + directory.nbytes);
  EXPECT_EQ(locator->n_disks, 1u);

  EXPECT_EQ(find_end(all), kZip64EndNbytes + kZip64LocatorNbytes);
  const auto narrow = parse_end(all.last(kEndNbytes));
  ASSERT_TRUE(narrow);
  EXPECT_EQ(narrow->directory.n_entries, 0xFFFFu);
  EXPECT_EQ(narrow->directory.offset, directory.offset);
  EXPECT_EQ(narrow->record_nbytes, kEndNbytes);
}

TEST(EndRecords, NeedEveryByteAndTheirSignature) {
  std::array<std::byte, kEndRecordsNbytes> bytes{};
  write_end_records({}, bytes.data());
  const std::span<const std::byte> all(bytes);
  EXPECT_FALSE(parse_zip64_end(all.first(kZip64EndNbytes - 1)));
  EXPECT_FALSE(parse_zip64_locator(all.subspan(kZip64EndNbytes, kZip64LocatorNbytes - 1)));
  EXPECT_FALSE(parse_end(all.last(kEndNbytes).first(kEndNbytes - 1)));
  EXPECT_FALSE(parse_zip64_end(all.subspan(1)));
  EXPECT_FALSE(parse_zip64_locator(all));
  EXPECT_FALSE(parse_end(all));
  EXPECT_FALSE(parse_end({}));
}

TEST(EndRecords, HugeClaimedSizeDoesNotWrap) {
  std::array<std::byte, kEndRecordsNbytes> bytes{};
  write_end_records({}, bytes.data());
  for (const std::uint64_t claimed : {~0ull, ~0ull - 11, ~0ull - 12, ~0ull - 13}) {
    store64(bytes.data() + 4, claimed);
    EXPECT_GE(parse_zip64_end(bytes)->record_nbytes, ~0ull - 1) << claimed;
  }
}

TEST(FindEnd, TakesTheLastSignatureWithAWholeRecordBehindIt) {
  const std::string end = std::string("PK\5\6") + std::string(18, '\0');
  EXPECT_EQ(find_end(bytes_of("")), std::nullopt);
  EXPECT_EQ(find_end(bytes_of(end.substr(0, 21))), std::nullopt);
  EXPECT_EQ(find_end(bytes_of(end)), 0u);
  EXPECT_EQ(find_end(bytes_of(end + "PK\5\6")), 0u);
  EXPECT_EQ(find_end(bytes_of(end + end)), 22u);
  EXPECT_EQ(find_end(bytes_of("PPK" + end)), 3u);
}

TEST(FindEnd, LooksBackOneLongestComment) {
  const std::string end = std::string("PK\5\6") + std::string(18, '\0');
  EXPECT_EQ(find_end(bytes_of("x" + end + std::string(65535, 'c'))), 1u);
  EXPECT_EQ(find_end(bytes_of("x" + end + std::string(65536, 'c'))), std::nullopt);
}

TEST(LocalHeader, Parses) {
  std::array<std::byte, kLocalHeaderNbytes> bytes{};
  const Entry entry{"", 7, 0};
  write_local_header(entry, 300, bytes.data());
  store16(bytes.data() + 8, 8);
  const auto header = parse_local_header(bytes);
  ASSERT_TRUE(header);
  EXPECT_EQ(header->flags, kFlagUtf8 | kFlagDescriptor);
  EXPECT_EQ(header->method, 8);
  EXPECT_EQ(header->name_nbytes, 0);
  EXPECT_EQ(header->extra_nbytes, 300);
  EXPECT_FALSE(parse_local_header(std::span(bytes).first(29)));
  bytes[0] = std::byte{'Q'};
  EXPECT_FALSE(parse_local_header(bytes));
}

TEST(CentralHeader, RoundTripsAtEveryEdge) {
  for (const std::uint64_t nbytes : {0ull, 1ull, 0xFFFFFFFEull, 0xFFFFFFFFull, 0x100000000ull}) {
    for (const std::uint64_t offset : {0ull, 0xFFFFFFFEull, 0xFFFFFFFFull, ~0ull}) {
      const auto bytes = central_bytes({"root/name", nbytes, offset}, 0xdeadbeef);
      CentralHeader header;
      ASSERT_EQ(parse_central_header(bytes, header), nullptr) << nbytes << " at " << offset;
      EXPECT_EQ(header.name, "root/name");
      EXPECT_EQ(header.nbytes, nbytes);
      EXPECT_EQ(header.stored_nbytes, nbytes);
      EXPECT_EQ(header.header_offset, offset);
      EXPECT_EQ(header.crc, 0xdeadbeefu);
      EXPECT_EQ(header.header_nbytes, bytes.size());
    }
  }
}

TEST(CentralHeader, IsRefusedWhenCutAnywhere) {
  const auto bytes = central_bytes({"root/name", 0x100000000, 0x100000000}, 1);
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    CentralHeader header;
    EXPECT_NE(parse_central_header(std::span(bytes).first(n), header), nullptr) << n;
  }
}

// A header whose three values all say "look in zip64", with `extra` behind the name.
std::vector<std::byte> with_extra(std::string_view extra) {
  auto bytes = central_bytes({"n", 0, 0}, 1);
  store32(bytes.data() + 20, kMax32);
  store32(bytes.data() + 24, kMax32);
  store32(bytes.data() + 42, kMax32);
  store16(bytes.data() + 30, extra.size());
  for (const char c : extra) bytes.push_back(static_cast<std::byte>(c));
  return bytes;
}

TEST(CentralHeader, FindsZip64BehindOtherExtraFields) {
  std::string extra("UT\2\0ab\0\0\0\0\1\0\30\0", 14);
  for (const char c : {'a', 'b', 'c'}) extra += c + std::string(7, '\0');
  CentralHeader header;
  const auto bytes = with_extra(extra);
  ASSERT_EQ(parse_central_header(bytes, header), nullptr);
  EXPECT_EQ(header.nbytes, std::uint64_t{'a'});
  EXPECT_EQ(header.stored_nbytes, std::uint64_t{'b'});
  EXPECT_EQ(header.header_offset, std::uint64_t{'c'});
}

TEST(CentralHeader, RefusesMissingOrMalformedZip64) {
  const std::string whole = std::string("\1\0\30\0", 4) + std::string(24, '\0');
  std::string short_field = whole.substr(0, 20);
  short_field[2] = 16;
  const std::string overlong = std::string("UT\377\0", 4) + whole;
  for (const std::string& extra : {std::string(), std::string("\1"), whole.substr(0, 27),
                                   short_field, overlong, std::string("UT\0\0", 4)}) {
    CentralHeader header;
    const auto bytes = with_extra(extra);
    EXPECT_STREQ(parse_central_header(bytes, header), "a zip64 size or offset is missing");
  }
}

TEST(CentralHeader, IgnoresExtraFieldsItDoesNotNeed) {
  auto bytes = central_bytes({"n", 5, 6}, 1);
  store16(bytes.data() + 30, 3);
  bytes.resize(bytes.size() + 3, std::byte{0xFF});
  CentralHeader header;
  ASSERT_EQ(parse_central_header(bytes, header), nullptr);
  EXPECT_EQ(header.nbytes, 5u);
  EXPECT_EQ(header.header_nbytes, bytes.size());
}

}  // namespace
}  // namespace ptsave::zip
