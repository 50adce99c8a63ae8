// Makes one call of a function of the system fail: the n-th after fail_after(). Preloaded by
// test_out_of_memory.py, which compiles it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { kMmap, kPthreadCreate, kCount };

static atomic_long n_left[kCount];
static atomic_long n_calls[kCount];

void fail_after(int function, long n) {
  atomic_store(&n_calls[function], 0);
  atomic_store(&n_left[function], n);
}

// Returns how many calls there were.
long stop_failing(int function) {
  atomic_store(&n_left[function], 0);
  return atomic_load(&n_calls[function]);
}

static int fails(int function) {
  atomic_fetch_add(&n_calls[function], 1);
  return atomic_load(&n_left[function]) > 0 && atomic_fetch_sub(&n_left[function], 1) == 1;
}

typedef void* (*Mmap)(void*, size_t, int, int, int, off_t);
typedef int (*PthreadCreate)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

void* mmap(void* address, size_t nbytes, int protection, int flags, int file, off_t offset) {
  if ((flags & MAP_ANONYMOUS) && fails(kMmap)) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  Mmap next = (Mmap)dlsym(RTLD_NEXT, "mmap");
  return next(address, nbytes, protection, flags, file, offset);
}

void* mmap64(void* address, size_t nbytes, int protection, int flags, int file, off_t offset) {
  return mmap(address, nbytes, protection, flags, file, offset);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                   void* argument) {
  if (fails(kPthreadCreate)) return EAGAIN;
  PthreadCreate next = (PthreadCreate)dlsym(RTLD_NEXT, "pthread_create");
  return next(thread, attributes, run, argument);
}
