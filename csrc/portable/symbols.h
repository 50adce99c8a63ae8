// Included before everything else in wheels for older systems (PTSAVE_PORTABLE).  It makes the
// linker take the versions of these functions in glibc 2.28 and gcc 8's libstdc++, instead of the
// build system's newer ones.  Missing functions are in definitions.cpp.
#pragma once

#if defined(__x86_64__)
#define PTSAVE_OLDEST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define PTSAVE_OLDEST_GLIBC "GLIBC_2.17"
#endif

// NOLINTBEGIN(hicpp-no-assembler): the only way to name a version
#define PTSAVE_SYMBOL(name, original, version) asm(".symver " name ", " original "@" version)
PTSAVE_SYMBOL("hypot", "hypot", PTSAVE_OLDEST_GLIBC);                // 2.35
PTSAVE_SYMBOL("pthread_once", "pthread_once", PTSAVE_OLDEST_GLIBC);  // 2.34
PTSAVE_SYMBOL("__isoc23_strtol", "strtol", PTSAVE_OLDEST_GLIBC);     // 2.38, and so on
PTSAVE_SYMBOL("__isoc23_strtoul", "strtoul", PTSAVE_OLDEST_GLIBC);
PTSAVE_SYMBOL("__isoc23_strtoll", "strtoll", PTSAVE_OLDEST_GLIBC);
PTSAVE_SYMBOL("__isoc23_strtoull", "strtoull", PTSAVE_OLDEST_GLIBC);
PTSAVE_SYMBOL("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE",
              "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", "GLIBCXX_3.4.11");
#undef PTSAVE_SYMBOL
#undef PTSAVE_OLDEST_GLIBC
// NOLINTEND(hicpp-no-assembler)
