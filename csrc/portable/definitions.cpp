// Functions that glibc 2.28 or gcc 8's libstdc++ lack (PTSAVE_PORTABLE, symbols.h).  They are in a
// separate library, whose names the modules do not export.
#include <cxxabi.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <exception>
#include <new>
#include <vector>

// NOLINTBEGIN(bugprone-reserved-identifier,bugprone-std-namespace-modification,readability-identifier-naming)
extern "C" {

// glibc 2.32.  Always says that there may be threads, because torch has some.
char __libc_single_threaded = 0;

// glibc 2.33; earlier they were macros around other functions.
int fstatat(int directory, const char* path, struct stat* status, int flags) noexcept {
#ifdef SYS_newfstatat
  return static_cast<int>(syscall(SYS_newfstatat, directory, path, status, flags));
#else
  return static_cast<int>(syscall(SYS_fstatat64, directory, path, status, flags));
#endif
}

int fstat(int fd, struct stat* status) noexcept {
  return static_cast<int>(syscall(SYS_fstat, fd, status));
}

// glibc 2.30.  Converts the deadline to the real-time clock, as libstdc++ does without it.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  constexpr long kNanoseconds = 1'000'000'000;
  timespec now{};
  timespec real{};
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &real) != 0) return EINVAL;
  real.tv_sec += deadline->tv_sec - now.tv_sec;
  real.tv_nsec += deadline->tv_nsec - now.tv_nsec;
  if (real.tv_nsec < 0) {
    real.tv_nsec += kNanoseconds;
    --real.tv_sec;
  } else if (real.tv_nsec >= kNanoseconds) {
    real.tv_nsec -= kNanoseconds;
    ++real.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &real);
}

// gcc 11's libstdc++, whose std::exception_ptr counts references inline; earlier its constructor
// and destructor did.
void copy_exception_ptr(void** self, void* const* other) __asm__(
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception_ptr(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
void add_exception_reference(void** self) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void release_exception(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void add_exception_reference(void** self) {
  void* copy = nullptr;  // never destroyed
  copy_exception_ptr(&copy, self);
}

void release_exception(void** self) {
  destroy_exception_ptr(self);
  *self = nullptr;
}

// gcc 13's libstdc++: a part of std::string::replace, for text that may be in the string itself.
void replace_in_string(void* self, char* place, std::size_t old_nbytes, const char* text, std::size_t nbytes, std::size_t n_behind) __asm__(
    "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE15_M_replace_coldEPcmPKcmm");

void replace_in_string(void* /*self*/, char* place, std::size_t old_nbytes, const char* text,
                       std::size_t nbytes, std::size_t n_behind) {
  const std::vector<char> copy(text, text + nbytes);
  std::memmove(place + nbytes, place + old_nbytes, n_behind);
  std::copy(copy.begin(), copy.end(), place);
}

// gcc 14's libstdc++: called when an exception leaves a noexcept function.
void __cxa_call_terminate(void* exception) noexcept {
  abi::__cxa_begin_catch(exception);
  std::terminate();
}

}  // extern "C"

namespace std {

// gcc 12's libstdc++.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
// NOLINTEND(bugprone-reserved-identifier,bugprone-std-namespace-modification,readability-identifier-naming)
