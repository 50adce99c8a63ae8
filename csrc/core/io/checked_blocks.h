// Blocks of a file with a table of their checksums behind the last block: CRC-32, little-endian.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptsave {

// Bytes per checksum.  A small read costs at least this much, and the table is 0.1 % of the file.
inline constexpr std::size_t kCheckedBlockNbytes = 4096;

}  // namespace ptsave
