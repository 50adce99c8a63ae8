"""Comparing two captured runs of 1 GiB each, beside reading both files.

    python -m benchmarks.capture_diff                  all pairs, 3 rounds
    python -m benchmarks.capture_diff near --rounds 9
    python -m benchmarks.capture_diff --output benchmarks/results/capture_diff.md

In each round every pair of captures is read and compared once by every contender, in a shuffled
order, each in a fresh process; both files are in the page cache.  A capture has the outputs of 32
modules, 32 MiB each in float32.  Times are those of the call alone, without imports.

equal: two runs with the same bits.
near: every number differs, by a few units in the last place.
dtypes: float32 beside bfloat16, which has half the bytes.

read(): both files, with one thread and into one buffer of 8 MiB: nothing is kept.
ptsave.load: both files into memory, checksums included.
compare_captures: `ptsave.compare_captures`, as `ptsave diff A B --capture` does; its goal is 0.7
times the speed of ptsave.load.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import ptsave
from benchmarks._program import WITHOUT_COLD, Program, settle_memory, table
from ptsave.bench.system import MIB, PeakMemory, make_warm

READ, LOAD, COMPARE = "read()", "ptsave.load", "compare_captures"
CONTENDERS = (READ, LOAD, COMPARE)
GOAL = 0.7  # times the speed of LOAD, at least
PAIRS = {"equal": "equal.pt", "near": "near.pt", "dtypes": "bfloat16.pt"}
N_MODULES, NBYTES = 32, 32 * MIB


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    contender: str
    a: str
    b: str


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    seconds: float
    peak_nbytes: int  # of memory, above that before the call


def read_files(a: str, b: str) -> None:
    buffer = bytearray(8 * MIB)
    for path in (a, b):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


CALLS: dict[str, Callable[[str, str], object]] = {
    READ: read_files,
    LOAD: lambda a, b: (ptsave.load(a), ptsave.load(b)),
    COMPARE: ptsave.compare_captures,
}


def run(**fields: Any) -> dict[str, Any]:
    task = Task(**fields)
    for path in (task.a, task.b):
        make_warm(Path(path))
    settle_memory(3 * 1024 * MIB)
    peak = PeakMemory()
    start = time.perf_counter()
    CALLS[task.contender](task.a, task.b)
    seconds = time.perf_counter() - start
    return asdict(Figure(seconds, peak.above_baseline()))


# ------------------------------------------------------------------------------------------- files


class Scaled(nn.Module):
    """Returns values that are new in each call."""

    def __init__(self, change: float) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.001 + self.change)


def write_capture(path: Path, change: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Scaled(change) for _ in range(N_MODULES)])
    x = torch.randn(NBYTES // 4).to(dtype)
    with ptsave.capture(model, path, what=("outputs",), include="?*"), torch.no_grad():
        model(x)


def write_captures(folder: Path) -> None:
    write_capture(folder / "a.pt", 0.0, torch.float32)
    write_capture(folder / "equal.pt", 0.0, torch.float32)
    write_capture(folder / "near.pt", 1e-6, torch.float32)
    write_capture(folder / "bfloat16.pt", 0.0, torch.bfloat16)


# ---------------------------------------------------------------------------------------- reporting

Figures = dict[str, list[Figure]]  # by contender


def rows_of(figures: Figures, nbytes: int) -> Iterator[list[str]]:
    loads = figures[LOAD]
    for contender in CONTENDERS:
        ours = figures[contender]
        ratios = [load.seconds / figure.seconds for load, figure in zip(loads, ours, strict=True)]
        met = ""
        if contender == COMPARE:
            met = "yes" if median(ratios) >= GOAL else "**no**"
        seconds = median(figure.seconds for figure in ours)
        yield [
            contender,
            f"{seconds:.3f}",
            f"{nbytes / seconds / 1e9:.2f}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f} - {max(ratios):.2f}",
            f"{median(figure.peak_nbytes for figure in ours) / MIB:.0f}",
            met,
        ]


def report(names: list[str], rounds: int, folder: Path) -> str:
    write_captures(folder)
    figures: dict[str, Figures] = {name: {} for name in names}
    for _, name in tqdm([*product(range(rounds), names)], leave=False, disable=None):
        for contender in random.sample(CONTENDERS, len(CONTENDERS)):
            task = Task(contender, str(folder / "a.pt"), str(folder / PAIRS[name]))
            figures[name].setdefault(contender, []).append(Figure(**PROGRAM.run_task(task)))
    tables = []
    for name in names:
        sizes = [(folder / file).stat().st_size for file in ("a.pt", PAIRS[name])]
        header = [
            f"{name}: {sum(sizes) / MIB:,.0f} MiB",
            *("seconds", "GB/s", "x ptsave.load", "min - max", "peak memory, MiB"),
            f"≥ {GOAL}",
        ]
        tables.append(table(header, rows_of(figures[name], sum(sizes))))
    return "\n\n".join(tables)


PROGRAM = Program(
    "capture_diff",
    "Comparing two captured runs",
    __doc__ or "",
    run,
    report,
    [*PAIRS],
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
