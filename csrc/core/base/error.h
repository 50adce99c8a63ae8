// Exceptions of the core library.
//
// Core code throws; `bindings/errors.cpp` translates each type into one Python exception:
// FormatError -> ptsave.CorruptCheckpointError, IoError -> OSError (errno and file name kept),
// Cancelled -> whatever the poll callback raised.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace ptsave {

// The bytes of an archive contradict the format, or a checksum does not match.
class FormatError : public std::runtime_error {
 public:
  static constexpr std::uint64_t kNoOffset = ~std::uint64_t{0};

  // `reason` is the wording of torch's own reader for the same fault where it has one (tools match
  // on it), `detail` ptsave's own findings.  `record` is the record's name without the root
  // folder, or empty; `offset` is an absolute position in the archive, or kNoOffset.
  FormatError(std::string reason, std::string detail, std::string record = {},
              std::uint64_t offset = kNoOffset)
      : std::runtime_error(reason + ": " + detail),
        reason_(std::move(reason)),
        detail_(std::move(detail)),
        record_(std::move(record)),
        offset_(offset) {}

  const std::string& reason() const { return reason_; }
  const std::string& detail() const { return detail_; }
  const std::string& record() const { return record_; }
  std::uint64_t offset() const { return offset_; }

 private:
  std::string reason_;
  std::string detail_;
  std::string record_;
  std::uint64_t offset_;
};

// A system call failed.  `operation` is the call's name ("pwrite"), `path` the file as the user
// named it.
class IoError : public std::runtime_error {
 public:
  IoError(int errnum, std::string operation, std::string path);

  int errnum() const { return errnum_; }
  const std::string& operation() const { return operation_; }
  const std::string& path() const { return path_; }

 private:
  int errnum_;
  std::string operation_;
  std::string path_;
};

}  // namespace ptsave
