"""The hardware's limits, most of them measured by ``cpp/io_limits.cpp``."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable
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


def measure(mode: str, path: Path, nbytes: int) -> tuple[int, dict[str, float]]:
    """Return the bytes moved, and the seconds by thread count."""
    threads = [str(count) for count in THREAD_COUNTS]
    command = [str(build()), mode, str(path), str(nbytes), *threads]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer = json.loads(result.stdout)
    return answer["nbytes"], answer["seconds"]


class PageCacheRead:
    """Reading a cached file, once, into the memory of tensors and with nothing but read().

    Parameters
    ----------
    path : Path
        A file at least as large as all tensors together.
    tensors : iterable of torch.Tensor
        Contiguous ones on the CPU.
    n_threads : int
        How many threads read, each a piece of 2 MiB at a time.
    """

    PIECE_NBYTES = 2 << 20

    def __init__(self, path: Path, tensors: Iterable[torch.Tensor], n_threads: int) -> None:
        self._path = path
        self._n_threads = n_threads
        self._pieces: list[tuple[memoryview, int]] = []
        offset = 0
        for tensor in tensors:
            memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            view = memoryview(memory)
            for begin in range(0, tensor.nbytes, self.PIECE_NBYTES):
                piece = view[begin : begin + self.PIECE_NBYTES]
                self._pieces.append((piece, offset + begin))
            offset += tensor.nbytes
        self._lock = threading.Lock()

    def run(self) -> None:
        with self._path.open("rb", buffering=0) as file:
            threads = [
                threading.Thread(target=self._read, args=(file.fileno(),))
                for _ in range(self._n_threads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._pieces:
            raise RuntimeError("a read has failed")

    def _read(self, fd: int) -> None:
        while self._pieces:
            with self._lock:
                if not self._pieces:
                    return
                view, offset = self._pieces.pop()
            if os.preadv(fd, [view], offset) != len(view):
                raise RuntimeError(f"a short read at {offset}")
