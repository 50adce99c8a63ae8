// A file of a header and payloads, one directly behind the other, like a safetensors file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/pipeline/stager.h"
#include "core/write/file_body.h"

namespace ptsave {

class PackedBody final : public FileBody {
 public:
  // `stager` brings all payloads, of these sizes.  Header, sizes and stager must outlive the body.
  PackedBody(const std::string& header, std::span<const std::uint64_t> payload_nbytes,
             Stager& stager, bool compute_crcs, std::size_t chunk_nbytes);

  void produce(ChunkPipeline& pipeline, std::size_t chunk, ChunkSink& sink) override;
  std::string tail() override;
  std::span<const std::uint32_t> crcs() override { return crcs_; }
  // Reads all payloads, which must be in host memory, through `arriving`.
  void follow(ArrivingPayloads* arriving) { arriving_ = arriving; }

 private:
  // The CRC of a payload's part in a chunk.
  struct PieceCrc {
    std::size_t payload;
    std::uint64_t nbytes;
    std::uint32_t crc;
  };

  std::vector<PayloadPiece> pieces_of(std::size_t chunk) const;

  const std::string& header_;
  Stager& stager_;
  ArrivingPayloads* arriving_ = nullptr;
  const bool compute_crcs_;
  std::vector<std::uint64_t> ends_;            // of the payloads, in the file
  std::vector<std::vector<PieceCrc>> pieces_;  // by chunk
  std::vector<std::uint32_t> crcs_;
};

}  // namespace ptsave
