"""Measures the hardware's limits with threads that only read or write.

``python -m ptsave.bench.limits MODE PATH NBYTES THREADS...`` prints JSON.  MODE is one of

* ``direct-write``: write a new, preallocated file with direct I/O, then fdatasync;
* ``buffered-write``: write a new, preallocated file into the page cache;
* ``tmpfs-write``: the same without preallocation, because on tmpfs that writes all pages;
* ``direct-read``: drop the file at PATH from the page cache, and read it with direct I/O;
* ``cached-read``: read the cached file at PATH into new memory made of huge pages.

If the file system has no direct I/O, all modes use the page cache.  Python is fast enough here,
because each call moves 8 MiB.  Limits that need compiled code (mapped pages, memcpy) are measured
by ``benchmarks/cpp/io_limits.cpp``.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from ptsave.bench.system import answer_of, fetch_free_memory, make_cold
from ptsave.support.threads import ThreadPool

THREAD_COUNTS = (1, 2, 4)
_CHUNK_NBYTES = 8 << 20

# Moves bytes of a file; takes the thread's number, the position and the number of bytes.
_Move: TypeAlias = Callable[[int, int, int], None]


def measure(mode: str, path: Path, nbytes: int) -> tuple[int, dict[str, float]]:
    """Measure a mode in a fresh process; return the bytes moved, and seconds per thread count."""
    arguments = [mode, str(path), str(nbytes), *map(str, THREAD_COUNTS)]
    answer = answer_of(f"measuring the limit ({mode})", "ptsave.bench.limits", *arguments)
    return answer["nbytes"], answer["seconds"]


def main(arguments: list[str]) -> None:
    """Measure a mode with each number of threads, and print the result as JSON."""
    mode, path, nbytes = arguments[0], Path(arguments[1]), int(arguments[2])
    if mode.endswith("-read"):
        nbytes = path.stat().st_size
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    source = _memory(nbytes) if mode.endswith("-write") else None
    if source is not None:
        _fill(source)
    seconds = {}
    for n_threads in map(int, arguments[3:]):
        if source is not None:
            seconds[str(n_threads)] = _write(mode, path, source, n_threads)
        elif mode == "direct-read":
            seconds[str(n_threads)] = _read_cold(path, nbytes, n_threads)
        else:
            seconds[str(n_threads)] = _read_cached(path, nbytes, n_threads)
    print(json.dumps({"nbytes": nbytes, "seconds": seconds}))


def _write(mode: str, path: Path, source: mmap.mmap, n_threads: int) -> float:
    path.unlink(missing_ok=True)
    os.sync()
    fetch_free_memory(len(source))
    direct = mode == "direct-write"
    view = memoryview(source)
    start = time.perf_counter()
    with _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct) as fd:
        if mode != "tmpfs-write":
            with suppress(OSError):  # some file systems cannot preallocate
                os.posix_fallocate(fd, 0, len(source))

        def write(thread: int, begin: int, nbytes: int) -> None:
            if os.pwrite(fd, view[begin : begin + nbytes], begin) != nbytes:
                raise OSError(f"{path}: a short write at {begin}")

        _in_threads(len(source), n_threads, write)
        if direct:
            os.fdatasync(fd)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def _read_cold(path: Path, nbytes: int, n_threads: int) -> float:
    make_cold(path, drop_all=False)
    buffers = [_memory(_CHUNK_NBYTES) for _ in range(n_threads)]
    for buffer in buffers:
        _fill(buffer)
    start = time.perf_counter()
    with _open(path, os.O_RDONLY, direct=True) as fd:

        def read(thread: int, begin: int, length: int) -> None:
            os.preadv(fd, [memoryview(buffers[thread])[:length]], begin)

        _in_threads(nbytes, n_threads, read)
    return time.perf_counter() - start


def _read_cached(path: Path, nbytes: int, n_threads: int) -> float:
    fetch_free_memory(nbytes)
    start = time.perf_counter()
    with closing(_memory(nbytes)) as target, _open(path, os.O_RDONLY, direct=False) as fd:
        with memoryview(target) as view:

            def read(thread: int, begin: int, length: int) -> None:
                with view[begin : begin + length] as part:
                    os.preadv(fd, [part], begin)

            _in_threads(nbytes, n_threads, read)
        return time.perf_counter() - start  # without the time to free the memory


@contextmanager
def _open(path: Path, flags: int, direct: bool) -> Iterator[int]:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o666)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        path_flags = flags & ~os.O_EXCL  # the failed attempt may have made the file
        fd = os.open(path, path_flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _memory(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # kernels without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _fill(memory: mmap.mmap) -> None:
    """Fill memory with random bytes, which no storage layer can compress or deduplicate."""
    with memoryview(memory) as view:

        def fill(thread: int, begin: int, nbytes: int) -> None:
            view[begin : begin + nbytes] = os.urandom(nbytes)

        _in_threads(len(memory), len(os.sched_getaffinity(0)), fill)


def _in_threads(nbytes: int, n_threads: int, move: _Move) -> None:
    """Move `nbytes` in chunks with `n_threads` threads; raise the first error."""
    begins = iter(range(0, nbytes, _CHUNK_NBYTES))

    def work(thread: int) -> None:
        try:
            for begin in begins:  # each step is one C call, so threads share the iterator safely
                move(thread, begin, min(_CHUNK_NBYTES, nbytes - begin))
        except Exception:
            list(begins)  # ends the other threads
            raise

    with ThreadPool(n_threads) as pool:
        list(pool.map(work, range(n_threads)))


if __name__ == "__main__":
    main(sys.argv[1:])
