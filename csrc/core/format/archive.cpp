#include "core/format/archive.h"

#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <unordered_set>

#include "core/format/zip.h"

namespace ptsave {
namespace {

bool has_parent_component(std::string_view name) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") return true;
    begin = end + 1;
  }
  return false;
}

}  // namespace

const char* record_name_fault(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name.front() == '/') return "starts with '/'";
  if (name.find('\0') != std::string_view::npos) return "holds a NUL";
  if (has_parent_component(name)) return "has a '..' component";
  return nullptr;
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMaxShown = 200;
  std::string out(text.substr(0, kMaxShown));
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  std::replace_if(out.begin(), out.end(), is_control, '?');
  return text.size() > kMaxShown ? out + "..." : out;
}

std::string quoted(std::string_view text) { return "'" + printable(text) + "'"; }

namespace {

// Files are addressed by a signed off_t.
constexpr auto kMaxFileNbytes =
    static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
constexpr std::string_view kPaddingId = "FB";

void check_root(std::string_view root) {
  if (root.empty() || root.find_first_of(std::string_view("/\0", 2)) != std::string_view::npos) {
    throw std::invalid_argument("invalid archive root " + quoted(root));
  }
}

void check_record_name(std::string_view root, std::string_view name) {
  const char* fault = record_name_fault(name);
  if (fault == nullptr && name.back() == '/') fault = "ends with '/'";
  if (fault == nullptr && root.size() + 1 + name.size() > zip::kMax16) fault = "is too long";
  if (fault != nullptr) throw std::invalid_argument("record name " + quoted(name) + " " + fault);
}

// The size of the "FB" padding field, head included, that aligns the payload to `alignment`.  All
// extra fields share one 16-bit length: if they exceed it, torch writes an unreadable file.
std::size_t padding_extra_nbytes(const zip::Entry& entry, std::uint64_t alignment) {
  const std::size_t zip64_nbytes = zip::zip64_extra_nbytes(entry);
  const std::uint64_t start =
      entry.header_offset + zip::local_header_nbytes(entry) + zip::kExtraHeadNbytes;
  const std::uint64_t over = start % alignment;
  const std::uint64_t padding = over == 0 ? 0 : alignment - over;
  if (padding > zip::kMax16 - zip::kExtraHeadNbytes - zip64_nbytes) {
    throw std::invalid_argument("alignment " + std::to_string(alignment) + " needs " +
                                std::to_string(padding) + " bytes of padding before record " +
                                quoted(entry.name) + ", more than an extra field can hold");
  }
  return zip::kExtraHeadNbytes + padding;
}

RecordLayout place(const zip::Entry& entry, std::uint64_t alignment) {
  // More than any header and descriptor take, so that no sum below can overflow.
  constexpr std::uint64_t kSlack = 4 * zip::kMax16;
  if (entry.header_offset > kMaxFileNbytes - kSlack ||
      entry.nbytes > kMaxFileNbytes - kSlack - entry.header_offset) {
    throw std::length_error("archive too large at record " + quoted(entry.name));
  }
  return {.header_offset = entry.header_offset,
          .payload_offset = entry.header_offset + zip::local_header_nbytes(entry) +
                            padding_extra_nbytes(entry, alignment),
          .nbytes = entry.nbytes,
          .descriptor_nbytes = zip::descriptor_nbytes(entry)};
}

// miniz requires room for the longest zip64 extra, even if the entry has none.
void check_directory_room(std::uint64_t directory_nbytes, const zip::Entry& entry) {
  if (directory_nbytes + zip::kCentralHeaderNbytes + entry.name.size() +
          zip::kMaxZip64ExtraNbytes >=
      zip::kMax32) {
    throw std::length_error("central directory too large at record " + quoted(entry.name));
  }
}

// The set of used names, as a flat table of their indices.  With many records, the nodes of a
// std::unordered_set would cost more than everything else in plan().
class NameSet {
 public:
  explicit NameSet(const ArchiveLayout& layout, std::size_t capacity)
      : layout_(layout), slots_(std::bit_ceil(2 * capacity + 1), kFree) {}

  // Returns false if an earlier index has the same name.
  bool insert(std::size_t index) {
    const std::size_t mask = slots_.size() - 1;
    const std::string_view name = layout_.name(index);
    std::size_t at = std::hash<std::string_view>{}(name)&mask;
    for (; slots_[at] != kFree; at = (at + 1) & mask) {
      if (layout_.name(slots_[at]) == name) return false;
    }
    slots_[at] = static_cast<std::uint32_t>(index);  // the central directory's limit keeps it small
    return true;
  }

 private:
  static constexpr std::uint32_t kFree = 0xFFFFFFFF;
  const ArchiveLayout& layout_;
  std::vector<std::uint32_t> slots_;
};

// Memory that is freed all at once, for the containers of one function call.
class Arena {
 public:
  // Suitable for any type that is not over-aligned.
  void* allocate(std::size_t nbytes) {
    nbytes = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    if (nbytes > left_) {
      left_ = std::max(nbytes, kBlockNbytes);
      blocks_.push_back(std::make_unique_for_overwrite<std::byte[]>(left_));
      next_ = blocks_.back().get();
    }
    std::byte* const found = next_;
    next_ += nbytes;
    left_ -= nbytes;
    return found;
  }

 private:
  static constexpr std::size_t kAlignment = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
  static constexpr std::size_t kBlockNbytes = std::size_t{64} << 10;

  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;
};

// An allocator for the standard library's containers.  The arena must outlive them.
template <typename T>
class ArenaAllocator {
 public:
  using value_type = T;

  explicit ArenaAllocator(Arena& arena) : arena_(&arena) {}
  template <typename U>
  // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions): containers convert
  ArenaAllocator(const ArenaAllocator<U>& other) : arena_(other.arena()) {}

  T* allocate(std::size_t n) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    if (n > static_cast<std::size_t>(-1) / 2 / sizeof(T)) throw std::bad_alloc();
    return static_cast<T*>(arena_->allocate(n * sizeof(T)));
  }
  void deallocate(T* /*memory*/, std::size_t /*n*/) {}

  Arena* arena() const { return arena_; }
  template <typename U>
  bool operator==(const ArenaAllocator<U>& other) const {
    return arena_ == other.arena();
  }

 private:
  Arena* arena_;
};

// hash_combine of c10, in 64 bits.
std::uint64_t combine(std::uint64_t seed, std::uint64_t value) {
  return seed ^ (value + 0x9e3779b9u + (seed << 6) + (seed >> 2));
}

std::string twenty_digits(std::uint64_t value) {
  const std::string digits = std::to_string(value);
  return std::string(20 - digits.size(), '0') + digits;
}

}  // namespace

std::uint64_t payload_offset_after(std::uint64_t header_offset, std::string_view full_name,
                                   std::uint64_t nbytes, std::uint64_t alignment) {
  return place({full_name, nbytes, header_offset}, alignment).payload_offset;
}

std::size_t ArchiveLayout::first_record_after(std::uint64_t offset) const {
  const auto found = std::ranges::upper_bound(records_, offset, {}, &RecordLayout::end);
  return static_cast<std::size_t>(found - records_.begin());
}

void ArchiveLayout::local_header(std::size_t i, std::byte* out) const {
  const RecordLayout& at = records_[i];
  const zip::Entry entry{full_name(i), at.nbytes, at.header_offset};
  const std::size_t extra_nbytes =
      at.payload_offset - at.header_offset - zip::local_header_nbytes(entry);
  std::byte* p = zip::write_local_header(entry, extra_nbytes, out);
  std::memcpy(p, kPaddingId.data(), kPaddingId.size());
  p = zip::store16(p + kPaddingId.size(), extra_nbytes - zip::kExtraHeadNbytes);
  std::memset(p, 'Z', extra_nbytes - zip::kExtraHeadNbytes);
}

void ArchiveLayout::data_descriptor(std::size_t i, std::uint32_t crc, std::byte* out) const {
  zip::write_descriptor({{}, records_[i].nbytes, records_[i].header_offset}, crc, out);
}

void ArchiveLayout::central_directory(std::byte* out) const {
  const std::byte* const begin = out;
  for (std::size_t i = 0; i < records_.size(); ++i) {
    out = zip::write_central_header({full_name(i), records_[i].nbytes, records_[i].header_offset},
                                    /*crc=*/0, out);
  }
  zip::write_end_records({.offset = central_directory_offset_,
                          .nbytes = static_cast<std::uint64_t>(out - begin),
                          .n_entries = records_.size()},
                         out);
}

void ArchiveLayout::set_central_crcs(std::span<const std::uint32_t> crcs,
                                     std::byte* directory) const {
  if (crcs.size() != records_.size()) throw std::invalid_argument("one CRC per record, please");
  for (std::size_t i = 0; i < records_.size(); ++i) {
    zip::store32(directory + zip::kCentralCrcOffset, crcs[i]);
    directory +=
        zip::central_header_nbytes({full_name(i), records_[i].nbytes, records_[i].header_offset});
  }
}

ArchiveLayout plan(const std::string& root, std::span<const RecordSpec> records,
                   std::uint64_t alignment) {
  return plan_part(root, records, alignment, 0);
}

ArchiveLayout plan_part(const std::string& root, std::span<const RecordSpec> records,
                        std::uint64_t alignment, std::uint64_t begin) {
  check_root(root);
  if (alignment == 0) throw std::invalid_argument("alignment must be at least 1");
  ArchiveLayout layout;
  layout.root_ = root;
  layout.name_ends_.reserve(records.size());
  layout.records_.reserve(records.size());
  NameSet seen(layout, records.size());
  std::uint64_t cursor = begin;
  std::uint64_t directory_nbytes = 0;
  for (const RecordSpec& record : records) {
    check_record_name(root, record.name);
    layout.full_names_.append(root).append(1, '/').append(record.name);
    layout.name_ends_.push_back(layout.full_names_.size());
    const std::size_t i = layout.records_.size();
    const zip::Entry entry{layout.full_name(i), record.nbytes, cursor};
    check_directory_room(directory_nbytes, entry);
    if (!seen.insert(i)) {
      throw std::invalid_argument("duplicate record name " + quoted(record.name));
    }
    const bool has_own = record.alignment % alignment == 0;
    layout.records_.push_back(place(entry, has_own ? record.alignment : alignment));
    cursor = layout.records_.back().end();
    directory_nbytes += zip::central_header_nbytes(entry);
  }
  layout.central_directory_offset_ = cursor;
  layout.nbytes_ = cursor + directory_nbytes + zip::kEndRecordsNbytes;
  return layout;
}

std::uint64_t hash_names(std::span<const std::string_view> names) {
  // torch folds the names in the iteration order of its std::unordered_set<std::string>.  That
  // order depends on the hashes and on how the table grows.  Both are the same for a set of
  // string_views, wherever its nodes are in memory.
  Arena nodes;
  std::unordered_set<std::string_view, std::hash<std::string_view>, std::equal_to<>,
                     ArenaAllocator<std::string_view>>
      written{ArenaAllocator<std::string_view>(nodes)};
  for (const std::string_view name : names) written.insert(name);
  std::uint64_t hash = 0;
  for (const std::string_view name : written) {
    hash = combine(hash, std::hash<std::string_view>{}(name));
  }
  return hash;
}

std::string serialization_id(std::uint64_t names_hash, std::span<const std::uint32_t> crcs) {
  std::uint64_t crcs_hash = 0;
  for (const std::uint32_t crc : crcs) crcs_hash = combine(crcs_hash, crc);
  return twenty_digits(names_hash) + twenty_digits(crcs_hash);
}

std::optional<std::uint32_t> descriptor_lookalike(std::span<const std::byte> front) {
  if (front.size() < 8 || zip::load32(front.data()) != zip::kDescriptorSignature) return {};
  return zip::load32(front.data() + 4);
}

}  // namespace ptsave
