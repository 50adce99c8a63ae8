#include "core/base/error.h"

#include <system_error>

namespace ptsave {

IoError::IoError(int errnum, std::string operation, std::string path)
    : std::runtime_error(operation + " " + path + ": " + std::generic_category().message(errnum)),
      errnum_(errnum),
      operation_(std::move(operation)),
      path_(std::move(path)) {}

}  // namespace ptsave
