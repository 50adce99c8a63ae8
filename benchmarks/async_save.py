"""Saving while the program goes on: how long it is blocked, how much it is slowed down.

    python -m benchmarks.async_save                    all workloads, 3 rounds
    python -m benchmarks.async_save blocked --rounds 9
    python -m benchmarks.async_save --output benchmarks/results/async_save.md

In each round every workload runs once with every contender, in a shuffled order, each in a fresh
process, which has saved something small before if it is warmed up.  Files go to a disk, without
fsync.

blocked: the call for 1 GiB of tensors, the first of a process; warmed up, the second and third one,
whose staging memory is there.  Tensors are overwritten between calls.  Stock is torch.save.  The
limit is a memcpy of as much by two threads, into huge pages that are faulted in, in every state.
Memory is the peak of resident memory during the first save, above the tensors.

loop: products of two 512 x 512 matrices with torch's threads, while 1 GiB is written: by a thread
that calls torch.save, by ptsave.async_save (without the time of its call), or not at all.  The
first write of a process; warmed up, three one after another, whose time is that of one.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import _limits
from benchmarks._program import Program, Task, is_warmed_up, settle_memory, table
from ptsave.bench.system import MIB, PeakMemory

STOCK, PTSAVE, LIMIT, NOTHING = "torch", "ptsave", "limit", "nothing"
CONTENDERS = {"blocked": (STOCK, PTSAVE, LIMIT), "loop": (NOTHING, STOCK, PTSAVE)}
GIB = 1 << 30
BLOCKED_GOAL_LIMIT = 1.3  # times the memcpy, at most
BLOCKED_GOAL_STOCK = 5.0  # times as fast as torch.save, at least
PEAK_GOAL = 1.05  # times the tensors, at most


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    seconds: list[float]  # of each call, or of one step of the loop
    peak_nbytes: int = 0
    write_seconds: float = 0.0  # from the call to the end of the file


def make_tensors() -> dict[str, torch.Tensor]:
    """Return 1 GiB of tensors of different sizes."""
    large = {f"large {i}": torch.randn(24 << 20) for i in range(10)}
    version = {"version": torch.zeros(())}
    return {**version, **large, **{f"small {i}": torch.randn(MIB) for i in range(16)}}


def save(contender: str, obj: object, path: Path) -> Callable[[], None]:
    """Save; returns what waits for the file."""
    if contender == STOCK:
        torch.save(obj, path)
        return lambda: None
    import ptsave

    return ptsave.async_save(obj, path).result


def measure_blocked(task: Task) -> Figure:
    folder = Path(task.folder)
    if is_warmed_up():
        save(task.contender, torch.ones(3), folder / "warm-up.pt")()
    tensors = make_tensors()
    settle_memory(2 * GIB)
    seconds, peak_nbytes = [], 0
    for i in range(3 if is_warmed_up() else 1):
        path = folder / "file.pt"
        path.unlink(missing_ok=True)
        memory = PeakMemory()
        start = time.perf_counter()
        wait = save(task.contender, tensors, path)
        seconds.append(time.perf_counter() - start)
        for tensor in tensors.values():
            tensor.add_(1)
        wait()
        write_seconds = time.perf_counter() - start
        if i == 0:
            peak_nbytes = memory.above_baseline()
        if int(torch.load(path, mmap=True)["version"]) != i:
            raise RuntimeError("the file has other values than there were at the call")
    path.unlink()
    return Figure(seconds, peak_nbytes, write_seconds)


def start_write(contender: str, obj: object, path: Path) -> Callable[[], bool]:
    """Begin a write, or 2 s of nothing; returns what tells whether it is going on."""
    if contender == NOTHING:
        end = time.perf_counter() + 2
        return lambda: time.perf_counter() < end
    if contender == STOCK:
        thread = threading.Thread(target=torch.save, args=(obj, path))
        thread.start()
        return thread.is_alive
    import ptsave

    future = ptsave.async_save(obj, path)
    return lambda: not future.done()


def measure_loop(task: Task) -> Figure:
    path = Path(task.folder) / "file.pt"
    a, b = torch.randn(2, 512, 512).unbind()
    tensors = make_tensors()
    if task.contender != NOTHING and is_warmed_up():
        save(task.contender, tensors, path)()  # ptsave's staging memory is there then
    for _ in range(50):
        torch.mm(a, b)
    settle_memory(2 * GIB)
    n_writes = 3 if is_warmed_up() else 1
    seconds, steps = 0.0, 0
    for _ in range(n_writes):
        path.unlink(missing_ok=True)
        going = start_write(task.contender, tensors, path)
        start = time.perf_counter()
        while going():
            torch.mm(a, b)
            steps += 1
        seconds += time.perf_counter() - start
    path.unlink(missing_ok=True)
    return Figure([seconds / max(steps, 1)], 0, seconds / n_writes)


def run_task(task: Task) -> Figure:
    if task.contender == LIMIT:
        _, by_threads = _limits.measure("copy", Path(task.folder), GIB)
        return Figure([by_threads["2"]])
    return Figure(**PROGRAM.run_task(task))


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[tuple[str, str], list[Figure]]  # by workload and contender


def run_rounds(names: list[str], rounds: int, folder: Path) -> Figures:
    figures: Figures = {}
    each = list(itertools.product(range(rounds), names))
    for _, name in tqdm(each, leave=False, disable=None):
        for contender in random.sample(CONTENDERS[name], len(CONTENDERS[name])):
            figure = run_task(Task(name, contender, str(folder)))
            figures.setdefault((name, contender), []).append(figure)
    return figures


# ---------------------------------------------------------------------------------------- reporting


def blocked_seconds(figure: Figure) -> float:
    """Return the seconds of the second and third call of a process, or of the only one."""
    return median(figure.seconds[1:] or figure.seconds)


def blocked_rows(figures: Figures) -> Iterator[list[str]]:
    for contender in CONTENDERS["blocked"]:
        ours = figures["blocked", contender]
        seconds = [blocked_seconds(figure) for figure in ours]
        total = "" if contender == LIMIT else f"{median(f.write_seconds for f in ours):.2f}"
        peak = "" if contender == LIMIT else f"{max(f.peak_nbytes for f in ours) / MIB:.0f}"
        spread = f"{min(seconds):.3f} - {max(seconds):.3f}"
        yield [contender, f"{median(seconds):.3f}", spread, total, peak]


def goal_rows(figures: Figures) -> Iterator[list[str]]:
    stock, ours, limit = (figures["blocked", contender] for contender in CONTENDERS["blocked"])
    pairs = zip(ours, limit, strict=True)
    of_limit = median(blocked_seconds(mine) / blocked_seconds(other) for mine, other in pairs)
    pairs = zip(ours, stock, strict=True)
    of_stock = median(blocked_seconds(other) / blocked_seconds(mine) for mine, other in pairs)
    peak = max(figure.peak_nbytes for figure in ours) / GIB
    for goal, value, met in (
        (f"blocked ≤ {BLOCKED_GOAL_LIMIT} memcpy", of_limit, of_limit <= BLOCKED_GOAL_LIMIT),
        (f"≥ {BLOCKED_GOAL_STOCK:g} times torch", of_stock, of_stock >= BLOCKED_GOAL_STOCK),
        (f"memory ≤ {PEAK_GOAL} of the tensors", peak, peak <= PEAK_GOAL),
    ):
        yield [goal, f"{value:.2f}", "yes" if met else "**no**"]


def loop_rows(figures: Figures) -> Iterator[list[str]]:
    alone = median(figure.seconds[0] for figure in figures["loop", NOTHING])
    for contender in CONTENDERS["loop"]:
        ours = figures["loop", contender]
        step = median(figure.seconds[0] for figure in ours)
        write = median(figure.write_seconds for figure in ours)
        lost = write * (1 - alone / step)
        row = [contender, f"{1e3 * step:.2f}", f"{step / alone:.2f}", f"{write:.2f}", f"{lost:.2f}"]
        yield row if contender != NOTHING else [*row[:3], "", ""]


def report(names: list[str], rounds: int, folder: Path) -> str:
    figures = run_rounds(names, rounds, folder)
    parts = []
    if "blocked" in names:
        header = ["blocked", "call, s", "min - max", "file, s", "MiB above"]
        parts.append(table(header, blocked_rows(figures)))
        parts.append(table(["goal", "ptsave", "met"], goal_rows(figures)))
    if "loop" in names:
        header = ["loop beside", "ms a step", "slower by", "the write, s", "time lost, s"]
        parts.append(table(header, loop_rows(figures)))
    return "\n\n".join(parts)


def run(**fields: Any) -> dict[str, Any]:
    task = Task(**fields)
    return asdict(measure_blocked(task) if task.workload == "blocked" else measure_loop(task))


PROGRAM = Program(
    "async_save",
    "Benchmark of saves in the background",
    __doc__ or "",
    run,
    report,
    [*CONTENDERS],
)

if __name__ == "__main__":
    PROGRAM.main()
