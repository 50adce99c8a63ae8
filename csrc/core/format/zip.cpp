#include "core/format/zip.h"

#include <algorithm>
#include <cstring>

namespace ptsave::zip {
namespace {

constexpr std::uint32_t kLocalSignature = 0x04034b50;
constexpr std::uint32_t kCentralSignature = 0x02014b50;
constexpr std::uint32_t kEndSignature = 0x06054b50;
constexpr std::uint32_t kZip64EndSignature = 0x06064b50;
constexpr std::uint32_t kZip64LocatorSignature = 0x07064b50;
constexpr std::uint16_t kZip64ExtraId = 0x0001;
// miniz's claims in the zip64 EOCD: made on Unix by version 3.0, needs version 4.5.
constexpr std::uint16_t kMadeBy = 0x031e;
constexpr std::uint16_t kVersionNeeded = 45;

template <typename T>
T load(const std::byte* p) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | static_cast<T>(std::to_integer<T>(p[i]) << (8 * i)));
  }
  return value;
}

std::byte* store(std::byte* p, std::uint64_t value, int nbytes) {
  for (int i = 0; i < nbytes; ++i) {
    *p++ = static_cast<std::byte>((value >> (8 * i)) & 0xFFu);
  }
  return p;
}

std::byte* store_text(std::byte* p, std::string_view text) {
  if (!text.empty()) std::memcpy(p, text.data(), text.size());
  return p + text.size();
}

std::uint16_t flags(const Entry& entry) {
  return entry.nbytes == 0 ? kFlagUtf8 : static_cast<std::uint16_t>(kFlagUtf8 | kFlagDescriptor);
}

// Writes only the fields that overflow 32 bits. miniz fills the local header's extra before it
// writes the payload, so its stored size there is 0.
std::byte* write_zip64_extra(const Entry& entry, std::uint64_t stored_nbytes, std::byte* p) {
  if (!entry.zip64()) return p;
  p = store16(p, kZip64ExtraId);
  p = store16(p, zip64_extra_nbytes(entry) - kExtraHeadNbytes);
  if (entry.nbytes >= kMax32) {
    p = store64(p, entry.nbytes);
    p = store64(p, stored_nbytes);
  }
  if (entry.header_offset >= kMax32) p = store64(p, entry.header_offset);
  return p;
}

// The zip64 field in a block of extra fields; empty if it is missing or the block is malformed.
std::span<const std::byte> find_zip64_extra(std::span<const std::byte> extra) {
  while (extra.size() >= kExtraHeadNbytes) {
    const std::size_t nbytes = load16(extra.data() + 2);
    if (nbytes > extra.size() - kExtraHeadNbytes) return {};
    if (load16(extra.data()) == kZip64ExtraId) return extra.subspan(kExtraHeadNbytes, nbytes);
    extra = extra.subspan(kExtraHeadNbytes + nbytes);
  }
  return {};
}

// Replaces the values that carry the "look in zip64" mark, in the order of the zip64 field.
// Returns false if the field lacks one.
bool resolve_zip64(std::span<const std::byte> extra, CentralHeader& header) {
  std::uint64_t* const values[] = {&header.nbytes, &header.stored_nbytes, &header.header_offset};
  if (std::none_of(std::begin(values), std::end(values), [](auto* v) { return *v == kMax32; })) {
    return true;
  }
  std::span<const std::byte> field = find_zip64_extra(extra);
  for (std::uint64_t* value : values) {
    if (*value != kMax32) continue;
    if (field.size() < 8) return false;
    *value = load64(field.data());
    field = field.subspan(8);
  }
  return true;
}

}  // namespace

std::uint16_t load16(const std::byte* p) { return load<std::uint16_t>(p); }
std::uint32_t load32(const std::byte* p) { return load<std::uint32_t>(p); }
std::uint64_t load64(const std::byte* p) { return load<std::uint64_t>(p); }
std::byte* store16(std::byte* p, std::uint64_t value) { return store(p, value, 2); }
std::byte* store32(std::byte* p, std::uint64_t value) { return store(p, value, 4); }
std::byte* store64(std::byte* p, std::uint64_t value) { return store(p, value, 8); }

std::size_t zip64_extra_nbytes(const Entry& entry) {
  if (!entry.zip64()) return 0;
  return kExtraHeadNbytes + (entry.nbytes >= kMax32 ? 16u : 0u) +
         (entry.header_offset >= kMax32 ? 8u : 0u);
}

std::size_t local_header_nbytes(const Entry& entry) {
  return kLocalHeaderNbytes + entry.name.size() + zip64_extra_nbytes(entry);
}

std::byte* write_local_header(const Entry& entry, std::size_t more_extra_nbytes, std::byte* out) {
  std::byte* p = store32(out, kLocalSignature);
  p = store16(p, 0);  // version needed
  p = store16(p, flags(entry));
  p = store16(p, 0);  // STORED
  p = store32(p, 0);  // time and date
  p = store32(p, 0);  // CRC and both sizes follow in the descriptor
  p = store32(p, 0);
  p = store32(p, 0);
  p = store16(p, entry.name.size());
  p = store16(p, zip64_extra_nbytes(entry) + more_extra_nbytes);
  p = store_text(p, entry.name);
  return write_zip64_extra(entry, 0, p);
}

std::uint32_t descriptor_nbytes(const Entry& entry) {
  if (entry.nbytes == 0) return 0;
  return entry.zip64() ? 24 : 16;
}

std::byte* write_descriptor(const Entry& entry, std::uint32_t crc, std::byte* out) {
  if (entry.nbytes == 0) return out;
  std::byte* p = store32(out, kDescriptorSignature);
  p = store32(p, crc);
  const int size_nbytes = entry.zip64() ? 8 : 4;
  p = store(p, entry.nbytes, size_nbytes);
  return store(p, entry.nbytes, size_nbytes);
}

std::size_t central_header_nbytes(const Entry& entry) {
  return kCentralHeaderNbytes + entry.name.size() + zip64_extra_nbytes(entry);
}

std::byte* write_central_header(const Entry& entry, std::uint32_t crc, std::byte* out) {
  std::byte* p = store32(out, kCentralSignature);
  p = store16(p, 0);  // version made by
  p = store16(p, 0);  // version needed
  p = store16(p, flags(entry));
  p = store16(p, 0);  // STORED
  p = store32(p, 0);  // time and date
  p = store32(p, crc);
  p = store32(p, std::min(entry.nbytes, kMax32));
  p = store32(p, std::min(entry.nbytes, kMax32));
  p = store16(p, entry.name.size());
  p = store16(p, zip64_extra_nbytes(entry));
  p = store16(p, 0);  // comment
  p = store16(p, 0);  // disk
  p = store16(p, 0);  // internal attributes
  p = store32(p, 0);  // external attributes
  p = store32(p, std::min(entry.header_offset, kMax32));
  p = store_text(p, entry.name);
  return write_zip64_extra(entry, entry.nbytes, p);
}

std::byte* write_end_records(const Directory& directory, std::byte* out) {
  std::byte* p = store32(out, kZip64EndSignature);
  p = store64(p, kZip64EndNbytes - 12);  // of the bytes behind this field
  p = store16(p, kMadeBy);
  p = store16(p, kVersionNeeded);
  p = store64(p, 0);  // this disk, the directory's disk
  p = store64(p, directory.n_entries);
  p = store64(p, directory.n_entries);
  p = store64(p, directory.nbytes);
  p = store64(p, directory.offset);

  p = store32(p, kZip64LocatorSignature);
  p = store32(p, 0);  // disk
  p = store64(p, directory.offset + directory.nbytes);
  p = store32(p, 1);  // disks in all

  p = store32(p, kEndSignature);
  p = store32(p, 0);  // this disk, the directory's disk
  p = store16(p, std::min(directory.n_entries, kMax16));
  p = store16(p, std::min(directory.n_entries, kMax16));
  p = store32(p, std::min(directory.nbytes, kMax32));
  p = store32(p, std::min(directory.offset, kMax32));
  return store16(p, 0);  // comment
}

std::optional<End> parse_end(std::span<const std::byte> bytes) {
  if (bytes.size() < kEndNbytes || load32(bytes.data()) != kEndSignature) return std::nullopt;
  const std::byte* p = bytes.data();
  End end;
  end.disk = load16(p + 4);
  end.directory_disk = load16(p + 6);
  end.n_entries_on_disk = load16(p + 8);
  end.directory = {.offset = load32(p + 16), .nbytes = load32(p + 12), .n_entries = load16(p + 10)};
  end.record_nbytes = kEndNbytes + load16(p + 20);
  return end;
}

std::optional<End> parse_zip64_end(std::span<const std::byte> bytes) {
  if (bytes.size() < kZip64EndNbytes || load32(bytes.data()) != kZip64EndSignature) {
    return std::nullopt;
  }
  const std::byte* p = bytes.data();
  End end;
  const std::uint64_t rest_nbytes = load64(p + 4);
  end.record_nbytes = rest_nbytes > ~std::uint64_t{12} ? ~std::uint64_t{0} : rest_nbytes + 12;
  end.disk = load32(p + 16);
  end.directory_disk = load32(p + 20);
  end.n_entries_on_disk = load64(p + 24);
  end.directory = {.offset = load64(p + 48), .nbytes = load64(p + 40), .n_entries = load64(p + 32)};
  return end;
}

std::optional<Zip64Locator> parse_zip64_locator(std::span<const std::byte> bytes) {
  if (bytes.size() < kZip64LocatorNbytes || load32(bytes.data()) != kZip64LocatorSignature) {
    return std::nullopt;
  }
  return Zip64Locator{.end_offset = load64(bytes.data() + 8), .n_disks = load32(bytes.data() + 16)};
}

std::optional<std::size_t> find_end(std::span<const std::byte> tail) {
  if (tail.size() < kEndNbytes) return std::nullopt;
  constexpr std::size_t kReach = kEndNbytes + kMax16;
  const std::size_t first = tail.size() > kReach ? tail.size() - kReach : 0;
  for (std::size_t i = tail.size() - kEndNbytes + 1; i-- > first;) {
    if (tail[i] == std::byte{'P'} && load32(tail.data() + i) == kEndSignature) return i;
  }
  return std::nullopt;
}

std::optional<LocalHeader> parse_local_header(std::span<const std::byte> bytes) {
  if (bytes.size() < kLocalHeaderNbytes || load32(bytes.data()) != kLocalSignature) {
    return std::nullopt;
  }
  const std::byte* p = bytes.data();
  return LocalHeader{.version_needed = load16(p + 4),
                     .flags = load16(p + 6),
                     .method = load16(p + 8),
                     .name_nbytes = load16(p + 26),
                     .extra_nbytes = load16(p + 28)};
}

const char* parse_central_header(std::span<const std::byte> bytes, CentralHeader& header) {
  if (bytes.size() < kCentralHeaderNbytes) return "the central directory ends inside a header";
  const std::byte* p = bytes.data();
  if (load32(p) != kCentralSignature) return "not a central header";
  const std::size_t name_nbytes = load16(p + 28);
  const std::size_t extra_nbytes = load16(p + 30);
  const std::size_t comment_nbytes = load16(p + 32);
  header.header_nbytes = kCentralHeaderNbytes + name_nbytes + extra_nbytes + comment_nbytes;
  if (header.header_nbytes > bytes.size()) return "a central header exceeds the central directory";
  header.flags = load16(p + 8);
  header.method = load16(p + 10);
  header.crc = load32(p + 16);
  header.stored_nbytes = load32(p + 20);
  header.nbytes = load32(p + 24);
  header.disk = load16(p + 34);
  header.external_attributes = load32(p + 38);
  header.header_offset = load32(p + 42);
  header.name = {reinterpret_cast<const char*>(p + kCentralHeaderNbytes), name_nbytes};
  if (!resolve_zip64(bytes.subspan(kCentralHeaderNbytes + name_nbytes, extra_nbytes), header)) {
    return "a zip64 size or offset is missing";
  }
  return nullptr;
}

}  // namespace ptsave::zip
