"""The hardware's limits, most of them measured by ``cpp/io_limits.cpp``."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "benchmarks" / "cpp" / "io_limits.cpp"
# Where CMake puts it too (PTSAVE_BUILD_BENCHMARKS, `make benchmark`).
PROGRAM = ROOT / "build" / "benchmark" / "io_limits"
THREAD_COUNTS = (1, 2, 4)


def build() -> Path:
    """Return the compiled program, compiled now if it is missing or older than its source."""
    if PROGRAM.exists() and PROGRAM.stat().st_mtime >= SOURCE.stat().st_mtime:
        return PROGRAM
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler found: install g++, or set CXX")
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-std=c++20", "-O2", "-pthread", SOURCE, "-o", PROGRAM], check=True)
    return PROGRAM


def measure(
    mode: str, path: Path, nbytes: int, thread_counts: Iterable[int] = THREAD_COUNTS
) -> tuple[int, dict[str, float]]:
    """Return the bytes moved, and the seconds by thread count."""
    threads = [str(count) for count in thread_counts]
    command = [str(build()), mode, str(path), str(nbytes), *threads]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer = json.loads(result.stdout)
    return answer["nbytes"], answer["seconds"]


class PageCacheRead:
    """Reading cached files, once, into the memory of tensors and with nothing but read().

    Parameters
    ----------
    files : iterable of (Path, iterable of torch.Tensor)
        Files, each at least as large as its tensors together, and contiguous tensors on the CPU.
    n_threads : int
        How many threads read, each a piece of 2 MiB at a time.
    """

    PIECE_NBYTES = 2 << 20

    def __init__(
        self, files: Iterable[tuple[Path, Iterable[torch.Tensor]]], n_threads: int
    ) -> None:
        self._n_threads = n_threads
        self._pieces: list[tuple[Path, memoryview, int]] = []
        for path, tensors in files:
            offset = 0
            for tensor in tensors:
                memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
                view = memoryview(memory)
                for begin in range(0, tensor.nbytes, self.PIECE_NBYTES):
                    piece = view[begin : begin + self.PIECE_NBYTES]
                    self._pieces.append((path, piece, offset + begin))
                offset += tensor.nbytes
        self._lock = threading.Lock()

    def run(self) -> None:
        with ExitStack() as stack:
            streams = {
                path: stack.enter_context(path.open("rb", buffering=0))
                for path in {path for path, _, _ in self._pieces}
            }
            descriptors = {path: stream.fileno() for path, stream in streams.items()}
            threads = [
                threading.Thread(target=self._read, args=(descriptors,))
                for _ in range(self._n_threads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._pieces:
            raise RuntimeError("a read has failed")

    def _read(self, descriptors: dict[Path, int]) -> None:
        while self._pieces:
            with self._lock:
                if not self._pieces:
                    return
                path, view, offset = self._pieces.pop()
            if os.preadv(descriptors[path], [view], offset) != len(view):
                raise RuntimeError(f"a short read at {offset}")
