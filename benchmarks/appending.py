"""Adding entries to an archive while the program goes on: how long that takes, and its rate.

    python -m benchmarks.appending                     all workloads, 3 rounds
    python -m benchmarks.appending stall --rounds 9
    python -m benchmarks.appending --output benchmarks/results/appending.md

In each round every workload runs once with every contender, in a shuffled order, each in a fresh
process.  Files go to a disk.

stall: 90 MiB in 32 tensors, added one by one, as hooks of a network do; between one such step and
the next everything is written.  Warmed up, the step's memory is there: the figure is the median of
five later steps; otherwise it is the first step of a process.  It is compared with a memcpy of the
same bytes by one thread into memory that is faulted in, in the same process, and with `torch.save`
into a file for each tensor.

rate: 24 such steps one after another, in an archive that has eight already if it is warmed up; from
the first call to the end of `close` with `fsync=True`, compared with the limit of direct writes of
as many bytes, by the number of threads whose median is best.

tiny: 20,000 numbers, one by one: microseconds of a call, and of all until the file is there.
"""

from __future__ import annotations

import itertools
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import ptsave
from benchmarks._program import Program, Task, is_warmed_up, settle_memory, table
from ptsave.bench import limits
from ptsave.bench.system import MIB

STOCK, PTSAVE, LIMIT = "torch", "ptsave", "limit"
CONTENDERS = {"stall": (STOCK, PTSAVE), "rate": (PTSAVE, LIMIT), "tiny": (PTSAVE,)}
N_TENSORS, STEP_NBYTES, N_STEPS, N_TINY = 32, 90 * MIB, 24, 20_000
STALL_GOAL = 1.3  # times the memcpy, at most
RATE_GOAL = 0.8  # of the limit, at least
TINY_GOAL = 20.0  # microseconds, at most


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    seconds: float  # of a step's calls, of the whole file, of a call
    reference_seconds: float = 0.0  # of a memcpy, or until the file is there


def make_tensors() -> list[torch.Tensor]:
    return [torch.randn(STEP_NBYTES // N_TENSORS // 4) for _ in range(N_TENSORS)]


def copy_seconds(tensors: list[torch.Tensor]) -> float:
    """Return how long copies into memory that is there take, of one thread."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(n_threads)
    return median(seconds)


def measure_stall(task: Task) -> Figure:
    folder = Path(task.folder) / "stall"
    folder.mkdir()
    tensors = make_tensors()
    reference = copy_seconds(tensors)
    seconds = []
    settle_memory(STEP_NBYTES)
    writer = ptsave.ArchiveWriter(folder / "run.pt")
    for step in range(6 if is_warmed_up() else 1):
        for tensor in tensors:
            tensor.add_(1)
        start = time.perf_counter()
        for i, tensor in enumerate(tensors):
            if task.contender == PTSAVE:
                writer.add(f"{step}/{i}", tensor)
            else:
                torch.save(tensor, folder / f"{step}-{i}.pt")
        seconds.append(time.perf_counter() - start)
        writer.flush()
    writer.close()
    shutil.rmtree(folder)
    return Figure(median(seconds[1:] or seconds), reference)


def add_steps(writer: ptsave.ArchiveWriter, steps: range, tensors: list[torch.Tensor]) -> None:
    for step in steps:
        for i, tensor in enumerate(tensors):
            writer.add(f"{step}/{i}", tensor)
        writer.forget_storages()


def measure_rate(task: Task) -> Figure:
    path = Path(task.folder) / "rate.pt"
    tensors = make_tensors()
    settle_memory(N_STEPS * STEP_NBYTES)
    with ptsave.ArchiveWriter(path, fsync=True, max_memory_bytes=512 * MIB) as writer:
        if is_warmed_up():
            add_steps(writer, range(-8, 0), tensors)
            writer.flush()
        start = time.perf_counter()
        add_steps(writer, range(N_STEPS), tensors)
    seconds = time.perf_counter() - start
    path.unlink()
    return Figure(seconds)


def measure_tiny(task: Task) -> Figure:
    path = Path(task.folder) / "tiny.pt"
    number = torch.tensor(1.0)
    values = [number + i for i in range(N_TINY)]
    settle_memory(STEP_NBYTES)
    with ptsave.ArchiveWriter(path) as writer:
        if is_warmed_up():
            for i in range(1000):
                writer.add(f"before/{i}", number.clone())
            writer.flush()
        start = time.perf_counter()
        for i, value in enumerate(values):
            writer.add(f"layer.weight/{i}", value)
        seconds = time.perf_counter() - start
    total = time.perf_counter() - start
    path.unlink()
    return Figure(seconds / N_TINY, total / N_TINY)


MEASURE = {"stall": measure_stall, "rate": measure_rate, "tiny": measure_tiny}


def measure_limit(folder: Path) -> Mapping[str, float]:
    """Return the seconds of direct writes by number of threads."""
    return limits.measure("direct-write", folder / "limit", N_STEPS * STEP_NBYTES)[1]


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[tuple[str, str], list[Figure]]  # by workload and contender


def median_seconds(figures: list[Figure]) -> float:
    return median(figure.seconds for figure in figures)


def run_rounds(names: list[str], rounds: int, folder: Path) -> Figures:
    figures: Figures = {}
    by_threads: dict[str, list[Figure]] = {}
    for _, name in tqdm([*itertools.product(range(rounds), names)], leave=False, disable=None):
        for contender in random.sample(CONTENDERS[name], len(CONTENDERS[name])):
            if contender == LIMIT:
                for n_threads, seconds in measure_limit(folder).items():
                    by_threads.setdefault(n_threads, []).append(Figure(seconds))
            else:
                figure = Figure(**PROGRAM.run_task(Task(name, contender, str(folder))))
                figures.setdefault((name, contender), []).append(figure)
    if by_threads:
        figures["rate", LIMIT] = min(by_threads.values(), key=median_seconds)
    return figures


# ---------------------------------------------------------------------------------------- reporting


def stall_rows(figures: Figures) -> Iterator[list[str]]:
    for contender in CONTENDERS["stall"]:
        ours = figures["stall", contender]
        ratio = median(each.seconds / each.reference_seconds for each in ours)
        each_ms = [f"{1e3 * median(each.seconds for each in ours):.1f}"]
        each_ms.append(f"{1e3 * median(each.reference_seconds for each in ours):.1f}")
        met = "" if contender == STOCK else "yes" if ratio <= STALL_GOAL else "**no**"
        yield [contender, *each_ms, f"{ratio:.2f}", met]


def rate_rows(figures: Figures) -> Iterator[list[str]]:
    ours, limit = figures["rate", PTSAVE], figures["rate", LIMIT]
    pairs = zip(ours, limit, strict=True)
    of_limit = median(other.seconds / mine.seconds for mine, other in pairs)
    nbytes = N_STEPS * STEP_NBYTES
    rates = [f"{nbytes / median(f.seconds for f in each) / 1e9:.2f}" for each in (ours, limit)]
    yield [*rates, f"{of_limit:.2f}", "yes" if of_limit >= RATE_GOAL else "**no**"]


def tiny_rows(figures: Figures) -> Iterator[list[str]]:
    ours = figures["tiny", PTSAVE]
    call = 1e6 * median(figure.seconds for figure in ours)
    total = 1e6 * median(figure.reference_seconds for figure in ours)
    yield [f"{call:.1f}", f"{total:.1f}", "yes" if call <= TINY_GOAL else "**no**"]


def report(names: list[str], rounds: int, folder: Path) -> str:
    figures = run_rounds(names, rounds, folder)
    goal = f"≤ {STALL_GOAL}"
    headers = {
        "stall": ["stall of a step", "ms", "memcpy, ms", "times the memcpy", goal],
        "rate": ["GB/s", "limit, GB/s", "of the limit", f"≥ {RATE_GOAL}"],
        "tiny": ["µs a call", "µs with the file", f"≤ {TINY_GOAL:g} µs"],
    }
    rows = {"stall": stall_rows, "rate": rate_rows, "tiny": tiny_rows}
    return "\n\n".join(table(headers[name], rows[name](figures)) for name in names)


def run(**fields: Any) -> dict[str, Any]:
    task = Task(**fields)
    return asdict(MEASURE[task.workload](task))


PROGRAM = Program(
    "appending",
    "Benchmark of archives that grow",
    __doc__ or "",
    run,
    report,
    [*CONTENDERS],
)

if __name__ == "__main__":
    PROGRAM.main()
