// Exceptions of the core library.
//
// Core code throws; `bindings/interpreter.cpp` translates each type into one Python exception:
// FormatError -> ptsave.CorruptCheckpointError with the file's name, IoError -> OSError (errno and
// file name kept), Cancelled -> whatever the poll callback raised.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace ptsave {

// The bytes of an archive contradict the format, or a checksum does not match.
class FormatError : public std::runtime_error {
 public:
  static constexpr std::uint64_t kNoOffset = ~std::uint64_t{0};

  // `reason` is the message of torch's own reader for the same fault, if there is one, because
  // tools match on it.  `detail` adds ptsave's own findings.  `record` is the record's name without
  // the root folder, or empty; `offset` is an absolute position in the archive, or kNoOffset.
  // `path` is the file as the user named it; parsers leave it empty, and naming_file() sets it.
  FormatError(std::string reason, std::string detail, std::string record = {},
              std::uint64_t offset = kNoOffset, std::string path = {})
      : std::runtime_error(reason + ": " + detail),
        reason_(std::move(reason)),
        detail_(std::move(detail)),
        record_(std::move(record)),
        offset_(offset),
        path_(std::move(path)) {}

  const std::string& reason() const { return reason_; }
  const std::string& detail() const { return detail_; }
  const std::string& record() const { return record_; }
  std::uint64_t offset() const { return offset_; }
  const std::string& path() const { return path_; }
  void set_path(const std::string& path) { path_ = path; }

 private:
  std::string reason_;
  std::string detail_;
  std::string record_;
  std::uint64_t offset_;
  std::string path_;
};

// The end of an archive is missing, including the central directory.
class MissingEndError : public FormatError {
 public:
  using FormatError::FormatError;
};

// Calls a function.  If it throws a FormatError, adds the file's name to the error.
template <typename Function>
auto naming_file(const std::string& path, const Function& function) {
  try {
    return function();
  } catch (FormatError& error) {
    error.set_path(path);
    throw;
  }
}

// A system call failed.  `operation` is the call's name ("pwrite"), `path` the file as the user
// named it.
class IoError : public std::runtime_error {
 public:
  IoError(int errnum, std::string operation, std::string path)
      : std::runtime_error(operation + " " + path + ": " + std::generic_category().message(errnum)),
        errnum_(errnum),
        operation_(std::move(operation)),
        path_(std::move(path)) {}

  int errnum() const { return errnum_; }
  const std::string& operation() const { return operation_; }
  const std::string& path() const { return path_; }

 private:
  int errnum_;
  std::string operation_;
  std::string path_;
};

}  // namespace ptsave
