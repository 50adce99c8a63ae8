"""Ranks of one machine that load the same cold file at the same time.

    python -m benchmarks.ranks                    1, 2, 4 and 8 ranks, 3 rounds
    python -m benchmarks.ranks 2 8 --rounds 9
    python -m benchmarks.ranks --output benchmarks/results/ranks.md

In each round every number of ranks loads once with torch, once with ptsave as processes that happen
to start together, and once with ptsave and LOCAL_WORLD_SIZE set, as torchrun sets it, in turn, each
of them first in one round of three.  Warmed up, memory that a virtual machine's host may have taken
back is fetched before the clock starts.  Ranks are forks of a fresh process that has imported both,
and make their first call; they begin together, each touches a byte of every page, and the slowest
counts.  "From the disk" is what all of them together have had read (/proc/self/io), as a multiple
of the file.  The limit is reading the file past the page cache once, with the number of threads
that is fastest.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import _limits
from benchmarks._program import Program, settle_memory, table
from benchmarks.archive import yes_or_no
from ptsave.bench.system import MIB, make_cold

FILE = "ranks.pt"
FILE_NBYTES = 512 * MIB
TENSOR_NBYTES = 16 * MIB
FETCHED_NBYTES = FILE_NBYTES + 64 * MIB
PAGE_NBYTES = 4096
MAX_TIMES_FILE = 1.05
CONTENDERS = ("torch", "ptsave", "ptsave, told")

Figure = tuple[float, float]  # seconds, bytes from the disk


@dataclass(frozen=True)
class Task:
    """What a fresh process has its forks do."""

    contender: str
    n_ranks: int
    path: str


def run(contender: str, n_ranks: int, path: str) -> Figure:
    """Return the seconds of the slowest rank, and what all have had read from the disk."""
    import ptsave

    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if contender == "ptsave, told":
        os.environ["LOCAL_WORLD_SIZE"] = str(n_ranks)
    load = torch.load if contender == "torch" else ptsave.load
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    begin, begun = os.pipe()
    results, reported = os.pipe()
    for _ in range(n_ranks):
        if os.fork() == 0:
            os.close(begun)
            os.read(begin, 1)  # ends when the parent closes its end
            os.write(reported, f"{_figures(load, path)}\n".encode())
            os._exit(0)
    os.close(reported)
    time.sleep(0.1 * n_ranks)  # all of them wait by now
    make_cold(Path(path))
    settle_memory((n_ranks + 1) * FETCHED_NBYTES)  # tensors of each rank, and the page cache
    os.close(begun)
    with open(results) as stream:
        lines = [line.split() for line in stream]
    if len(lines) != n_ranks:
        raise RuntimeError(f"{n_ranks - len(lines)} of {n_ranks} ranks failed")
    return max(float(seconds) for seconds, _ in lines), sum(float(count) for _, count in lines)


def _figures(load: Callable[[str], Any], path: str) -> str:
    before, begin = _read_nbytes(), time.perf_counter()
    for tensor in load(path).values():
        tensor.view(-1)[:: PAGE_NBYTES // 4].sum()
    return f"{time.perf_counter() - begin} {_read_nbytes() - before}"


def _read_nbytes() -> int:
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


# --------------------------------------------------------------------------------------- the rounds


def report(names: list[str], rounds: int, folder: Path) -> str:
    path = folder / FILE
    numel, n_tensors = TENSOR_NBYTES // 4, FILE_NBYTES // TENSOR_NBYTES
    torch.save({str(i): torch.full((numel,), float(i)) for i in range(n_tensors)}, path)
    os.sync()
    limits: list[float] = []
    figures: dict[tuple[str, str], list[Figure]] = {}
    for turn in range(rounds):
        first = turn % len(CONTENDERS)  # whoever comes first may find the disk rested
        make_cold(path)
        limits.append(min(_limits.measure("direct-read", path, 0)[1].values()))
        for name in names:
            for contender in CONTENDERS[first:] + CONTENDERS[:first]:
                seconds, nbytes = PROGRAM.run_task(Task(contender, int(name), str(path)))
                times_file = nbytes / path.stat().st_size
                figures.setdefault((name, contender), []).append((seconds, times_file))

    def rows() -> Iterator[list[str]]:
        for name in names:
            of_torch = [seconds for seconds, _ in figures[name, "torch"]]
            for contender in CONTENDERS:
                yield row(name, contender, figures[name, contender], of_torch)

    limit = f"Limit, one direct read of the file: {median(limits):.2f} s"
    header = ["ranks", "", "slowest, s", "min - max", "from the disk", "of torch's time", "met"]
    return f"{table(header, rows())}\n\n{limit} ({min(limits):.2f} - {max(limits):.2f})."


def row(name: str, contender: str, figures: list[Figure], of_torch: list[float]) -> list[str]:
    seconds = [each for each, _ in figures]
    times_file = median(times for _, times in figures)
    ratio = median(mine / stock for mine, stock in zip(seconds, of_torch, strict=True))
    met = "" if contender == "torch" else yes_or_no(times_file <= MAX_TIMES_FILE and ratio <= 1)
    spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
    figure = f"{times_file:.2f} x the file"
    return [name, contender, f"{median(seconds):.2f}", spread, figure, f"{ratio:.2f}", met]


PROGRAM = Program(
    "ranks", "Ranks that load one file", __doc__ or "", run, report, ["1", "2", "4", "8"]
)

if __name__ == "__main__":
    PROGRAM.main()
