// Blocks of a file whose checksums are in a table behind the last of them: CRC-32, little-endian.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptsave {

// One checksum for so many bytes: what a small read costs at least, and 0.1 % of the file.
inline constexpr std::size_t kCheckedBlockNbytes = 4096;

}  // namespace ptsave
