// Runs parts of tests in forked processes.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

namespace ptsave::forked {

// Runs `action` in a forked process that is killed when it takes too long; returns what wait says.
inline int in_child(const std::function<void()>& action) {
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr unsigned kMaxSeconds = 120;
    ::alarm(kMaxSeconds);
    action();
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

}  // namespace ptsave::forked
