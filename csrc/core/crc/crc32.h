// CRC-32 as zip uses it (reflected polynomial 0xEDB88320, initial value and final xor 0xFFFFFFFF).
//
// Each call goes to the best kernel for the CPU, which is detected once.  All functions are pure
// and safe for concurrent use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ptsave {

// Same as zlib's crc32().  Continues `crc`, the CRC of all earlier bytes (0 if there are none),
// over `nbytes` bytes at `data`.
std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t nbytes);

// memcpy(dst, src, nbytes) and crc32(crc, dst, nbytes) in one pass.  Each byte of the source is
// read once, so the checksum matches the copy even if another thread changes the source.  The two
// regions must not overlap.  A large destination bypasses the caches, which suits bytes that the
// CPU does not read again soon (bounce buffers of direct I/O, tensors being loaded).
std::uint32_t crc32_copy(std::uint32_t crc, void* dst, const void* src, std::size_t nbytes);

// The CRC of A followed by B, given crc(A), crc(B) and B's length in bytes.  O(log nbytes_b).
std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b);

// Bytes are checksummed, and read or written, in pieces of this size.  The second of these two
// steps then finds the piece in the cache.
inline constexpr std::size_t kCachePieceNbytes = std::size_t{256} << 10;

// The size of a block in a file of checked blocks.  The table of the blocks' checksums follows the
// last block (little-endian), and is 0.1 % of the file.  A read always takes whole blocks.
inline constexpr std::size_t kCheckedBlockNbytes = 4096;

// One implementation; tests and benchmarks run over all of them.
struct Crc32Kernel {
  const char* name;  // "portable", "pclmulqdq", "vpclmulqdq_avx2", "vpclmulqdq", "arm64"
  bool (*supported)();
  std::uint32_t (*update)(std::uint32_t crc, const void* data, std::size_t nbytes);
  std::uint32_t (*copy)(std::uint32_t crc, void* dst, const void* src, std::size_t nbytes);
};

// Every kernel compiled for this architecture, slowest first.
std::span<const Crc32Kernel> crc32_kernels();

// The kernel that crc32() uses on this CPU.
const Crc32Kernel& crc32_active_kernel();

}  // namespace ptsave
